"""The names and values that C, shell and Python share are the same on both sides, and options survive the way."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin import contract

HEADER = (Path(__file__).resolve().parents[2] / "spank" / "contract.h").read_text(encoding="utf-8")
DEFINES = re.findall(r'^#define JIT_(\w+) +("[^"]*"|\d+)$', HEADER, re.MULTILINE)
ROWS = re.findall(r'KEY\("([^"]+)", "([^"]+)", JIT_(\w+), (\d+), (\d+)\)', HEADER)
KEYS, SITE_KEYS = ROWS[: len(contract.ALLOWED)], ROWS[len(contract.ALLOWED) :]


def test_constants() -> None:
    """Option, environment names, exit codes, file names and spool are equal, and neither side has one more."""
    python = {
        n: v for n, v in vars(contract).items() if n.isupper() and not n.startswith("_") and type(v) in (str, int)
    }
    assert {name: ast.literal_eval(value) for name, value in DEFINES} == python


def test_keys() -> None:
    """The keys come in the same order with the same text of what is allowed and the same bounds."""
    python = [
        (key, allowed, "" if least is None else str(least), "" if most is None else str(most))
        for key, (allowed, least, most) in contract.ALLOWED.items()
    ]
    numbers = {"WHOLE", "NUMBER", "NUMBER_OR_OFF"}
    c = [(k, a, least if kind in numbers else "", most if kind in numbers else "") for k, a, kind, least, most in KEYS]
    assert c == python


def test_site_keys() -> None:
    """The keys of the site's file are the same too, and none of them is one of the option's."""
    python = [(key, *(str(part) for part in row)) for key, row in contract.SITE_ALLOWED.items()]
    assert python == SITE_KEYS
    assert not contract.SITE_ALLOWED.keys() & contract.ALLOWED.keys()


def test_limits() -> None:
    """What a site can limit, and the value where nobody gives one, are the same on both sides."""
    rows = re.findall(r'LIMIT\("([^"]+)", "([^"]+)", (\d+)\)', HEADER)
    assert {key: most for key, most, _ in rows} == contract.LIMITS
    assert {key: int(usual) for key, _, usual in rows} == {k: getattr(contract.Options(""), k) for k in contract.LIMITS}
    assert set(contract.LIMITS.values()) < contract.SITE_ALLOWED.keys()


def test_the_job_id_in_the_directory() -> None:
    """%j becomes the job's id where the job runs, wherever it stands; a directory without it stays."""
    options = contract.Options(dir="/scratch/%j/ck-%j", keep=7)
    assert contract.in_job(options, "100_7") == contract.Options(dir="/scratch/100_7/ck-100_7", keep=7)
    assert contract.in_job(contract.Options(dir="/d"), "1") == contract.Options(dir="/d")


def test_kinds() -> None:
    """C takes for whole numbers, for paths and for `off` exactly the keys that Python does."""
    kinds = {key: kind for key, _, kind, _, _ in KEYS}
    assert {k for k, kind in kinds.items() if kind == "WHOLE"} == contract.WHOLE
    assert {k for k, kind in kinds.items() if kind == "NUMBER_OR_OFF"} == {"hang"}
    assert {k for k, kind in kinds.items() if kind == "SWITCH"} == {"relaunch"}
    assert {k for k, kind in kinds.items() if kind == "PATH"} == {"dir", "resume"}


def test_paths_at_the_ends() -> None:
    """options.c finds `dir` first and `resume` last in the table."""
    assert (KEYS[0][0], KEYS[-1][0]) == ("dir", "resume")


def test_keys_are_attributes() -> None:
    """Every key of the option is an attribute of Options and the other way round."""
    assert {key.replace("-", "_") for key in contract.ALLOWED} == set(contract.Options.__dataclass_fields__)


WRONG = ["keep=0", "keep=1_0", "keep= 5", "keep=+5", "keep=٣", "keep", "keep=", "save=1e3", "save=86400.000000001"]
WRONG += ["hang=inf", "hang=nan", "settle=.5", "settle=1.", "relaunch=ON", "resume=/a\nb", "dirr=/d"]


@pytest.mark.parametrize("text", ["keep=1", *(f"dir=/d,{item}" for item in WRONG)])
def test_refused(text: str) -> None:
    """What is not in the stated grammar is refused with the key and what is allowed."""
    with pytest.raises(contract.OptionError, match=r"key '.+'.*(allowed|needs|missing)"):
        contract.parse_options(text)


def test_last_wins() -> None:
    """Of a key given twice the last value counts; empty items are nothing."""
    assert contract.parse_options("dir=/a,,keep=1,dir=/b,keep=7,") == contract.Options(dir="/b", keep=7)


@given(
    st.builds(
        contract.Options,
        dir=st.from_regex(r"/[a-z .=%é]{0,20}", fullmatch=True),
        keep=st.integers(1, 1000),
        relaunch=st.sampled_from(["on", "off"]),
        hang=st.one_of(st.just(0.0), st.integers(20, 10000).map(lambda n: n / 10)),
        save=st.integers(1000, 86400000).map(lambda n: n / 1000),
    )
)
def test_round_trip(options: contract.Options) -> None:
    """What format_options writes, parse_options reads back, value for value."""
    assert contract.parse_options(contract.format_options(options)) == options


def test_nccl_may_neither_end_the_process_nor_go_on_after_an_abort() -> None:
    """The defaults for ranks keep watchdog and monitor from ending them, and explain themselves."""
    assert contract.NCCL["TORCH_NCCL_ASYNC_ERROR_HANDLING"][0] == "0"
    assert contract.NCCL["TORCH_NCCL_ENABLE_MONITORING"][0] == "0"
    assert all(why for _, why in contract.NCCL.values())
