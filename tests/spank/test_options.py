"""The C parser and slurm_plugin.contract.parse_options agree, and the canonical text is what Python reads."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_plugin import contract

SPANK = Path(__file__).resolve().parents[2] / "spank"
DRIVER = Path(__file__).with_name("options_driver.c")
Canonical = Callable[[str, str], tuple[str, str]]

VALUES = [
    "0",
    "1",
    "2",
    "1000",
    "1001",
    "86400",
    "86400.000000001",
    "1_0",
    " 5",
    "5 ",
    "+5",
    "-1",
    "1e2",
    "0x10",
    ".5",
    "1.",
]
VALUES += [
    "1.5",
    "off",
    "on",
    "Off",
    "nan",
    "inf",
    "",
    "/a/b",
    "a",
    "1.1234567890",
    "0000000005",
    "000000005",
    "٣",
    "a\nb",
    "é",
]
KEYS = [*contract.ALLOWED, "", "di", "dirs", "DIR", "dir ", "hang_floor", "réq"]
item = st.one_of(
    st.tuples(st.sampled_from(KEYS), st.sampled_from(["=", "", "=="]), st.sampled_from(VALUES)).map("".join),
    st.tuples(st.sampled_from(KEYS), st.just("="), st.decimals(0, 100000, places=3).map(str)).map("".join),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
)
texts = st.lists(item, max_size=5).map(",".join)


def verdict(text: str) -> bool:
    """Whether Python takes the text, given that a directory is always there."""
    try:
        contract.parse_options(f"dir=/d,{text}")
    except contract.OptionError:
        return False
    return True


@settings(max_examples=1500, deadline=None)
@given(texts)
@example("keep=5,keep=6,,dir=x")
@example("dir=/a\x7fb")
def test_same_verdict_and_values(canonical: Canonical, text: str) -> None:
    """C takes what Python takes, and Python reads the same values from the canonical text as from the user's."""
    out, why = canonical(text, "/home/u")
    assert (why == "") == verdict(text), why
    if not why:
        mine, theirs = contract.parse_options(out), contract.parse_options(f"dir=jit-ckpt,{text}")
        for name in contract.Options.__dataclass_fields__:
            wanted = getattr(theirs, name)
            if name in ("dir", "resume") and wanted and not wanted.startswith("/"):
                wanted = f"/home/u/{wanted}"
            assert getattr(mine, name) == wanted


@pytest.mark.parametrize(
    ("text", "cwd", "out"),
    [
        ("", "/home/u", "dir=/home/u/jit-ckpt"),
        ("", "/", "dir=/jit-ckpt"),
        ("keep=3,dir=a b,keep=4", "/w", "dir=/w/a b,keep=4"),
        ("resume=old/m3-r0,dir=/d", "/w", "dir=/d,resume=/w/old/m3-r0"),
        ("hang=off,save=1.5", "/w", "dir=/w/jit-ckpt,hang=off,save=1.5"),
    ],
)
def test_canonical_text(canonical: Canonical, text: str, cwd: str, out: str) -> None:
    """The directory is always there and absolute, keys come in one order, defaults stay out."""
    assert canonical(text, cwd) == (out, "")


@pytest.mark.parametrize("key", list(contract.ALLOWED))
def test_message_names_key_and_allowed(canonical: Canonical, key: str) -> None:
    """Every refusal is one printable line with the key and what it allows."""
    for item in (key, f"{key}=", f"{key}=\n\x1b"):
        _, why = canonical(item, "/w")
        assert f"cannot use key '{key}'" in why
        assert contract.ALLOWED[key][0] in why
        assert why.isprintable()


def test_message_of_unknown_key(canonical: Canonical) -> None:
    """An unknown key is refused with all keys there are."""
    assert canonical("kep=3", "/w")[1] == f"cannot use key 'kep': unknown; allowed keys: {', '.join(contract.ALLOWED)}"


@pytest.mark.parametrize("cwd", ["/a,b", "/a\nb"])
def test_working_directory_that_cannot_be_carried(canonical: Canonical, cwd: str) -> None:
    """A default below a directory with a comma or a newline is refused, an absolute `dir` is taken there."""
    assert "cannot use key 'dir'" in canonical("", cwd)[1]
    assert canonical("dir=/d", cwd) == ("dir=/d", "")


@pytest.mark.parametrize("size", [4094, 4095, 4096, 100_000])
def test_long_paths(canonical: Canonical, size: int) -> None:
    """A path is carried whole or refused, never cut."""
    path = "/" + "x" * (size - 1)
    out, why = canonical(f"dir={path}", "/w")
    assert (out == f"dir={path}") if size < 4096 else why.startswith("cannot use key 'dir'")
    assert "cannot use key 'dir'" in canonical(f"dir={'x' * 4090}", "/working/directory")[1]


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The parser under address and undefined-behaviour sanitizers: random bytes, no finding, the same verdicts."""
    program = tmp_path / "driver"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(DRIVER), str(SPANK / "options.c"), str(SPANK / "keys.c")]
    subprocess.run(["gcc", *flags, f"-I{SPANK}", *sources, "-o", str(program)], check=True, timeout=120)
    draw = random.Random(2024)
    inputs = []
    for _ in range(3000):
        words = [draw.choice(KEYS) + draw.choice(["=", ""]) + draw.choice(VALUES) for _ in range(draw.randrange(5))]
        mutated = bytearray(",".join(words).encode())
        for _ in range(draw.randrange(3) if mutated else 0):
            mutated[draw.randrange(len(mutated))] = draw.randrange(1, 256)
        inputs.append(bytes(mutated))
    inputs += [b"dir=" + b"x" * n for n in (4091, 4095, 4096, 70_000)]
    done = subprocess.run(
        [str(program)], input=b"\0".join(inputs) + b"\0", capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    answers = done.stdout.decode().split()
    for raw, answer in zip(inputs, answers, strict=True):
        if len(raw) < 4000:
            assert (answer == "0") == verdict(raw.decode(errors="surrogateescape")), raw
