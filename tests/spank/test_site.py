"""The C reader of the site's file and slurm_plugin/site.py agree; enabling, limits, arguments of the plugin."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_plugin import contract
from slurm_plugin.site import SiteError, parse
from tests.spank.conftest import FREE_OF_SLURM, SPANK

Parse = Callable[[bytes], tuple[Any, str]]
Load = Callable[..., tuple[Any, str]]
OPTION_KEYS = [key for key in contract.ALLOWED if key != "resume"]
ENABLED = "enable = gpu, long\ndefault-partition = gpu\n"

KEYS = [*contract.SITE_ALLOWED, *contract.ALLOWED, "", "enabl", "enable ", "max_keep", "é"]
VALUES = [
    "on",
    "off",
    "ON",
    "3",
    "0",
    "61",
    "1.5",
    "1.",
    "1e3",
    "gpu",
    "gpu,cpu",
    "gpu , cpu",
    "on,gpu",
    ",",
    "a b",
    "x" * 65,
]
VALUES += [
    "/a",
    "/a,/b",
    "/a , b",
    "relative",
    "/a#b",
    "/a #b",
    "#",
    "",
    "/é",
    "/a\r",
    "/a\x7f",
    "1000000",
    "0000000005",
    "²",
]
GAPS = ["", " ", "\t", "  "]
line = st.one_of(
    st.tuples(
        *(st.sampled_from(part) for part in (GAPS, KEYS, GAPS, ["=", "", "=="], GAPS, VALUES, GAPS, ["", "#c", " #c"]))
    ).map("".join),
    st.text(max_size=12),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
texts = st.lists(st.one_of(line, st.binary(max_size=8)), max_size=4).map(b"\n".join)


def python_says(text: bytes) -> tuple[dict[str, bytes], str]:
    """The values as they were written, and the reason of a refusal."""
    try:
        site = parse(text)
    except SiteError as error:
        return {}, str(error)
    return {key: os.fsencode(one.value) for key, one in site.given.items()}, ""


def c_says(values: Any) -> dict[str, bytes]:
    """The values in a struct jit_site."""
    found = {key: one.value for key, one in zip(contract.ALLOWED, values.options.value, strict=True)}
    found |= {key: one.value for key, one in zip(contract.SITE_ALLOWED, values.value, strict=True)}
    return {key: value for key, value in found.items() if value}


@settings(max_examples=800, deadline=None)
@given(texts)
@example(b"keep = 3\nkeep = 3")
@example(b"# \0")
@example(b"dir = /" + b"a" * 4095)
@example(b"dir = /" + b"a" * 4094)
@example(b"#" * (64 << 10))
@example(b"#" * ((64 << 10) + 1))
def test_same_verdict_and_values(parse_site: Parse, text: bytes) -> None:
    """C takes the files that Python takes, with the same values, and refuses the others with the same words."""
    values, why = parse_site(text)
    taken, reason = python_says(text)
    assert (why == "") == (reason == ""), (why, reason)
    if not why:
        assert c_says(values) == taken
    elif why.isascii() and reason.isascii():
        assert why == reason[: len(why)]


@pytest.mark.parametrize("key", [*contract.SITE_ALLOWED, *OPTION_KEYS])
def test_message_names_line_key_and_allowed(parse_site: Parse, key: str) -> None:
    """Every refusal is one printable line with file, line, key and what it allows."""
    allowed = contract.SITE_ALLOWED[key][0] if key in contract.SITE_ALLOWED else contract.ALLOWED[key][0]
    for text in (key, f"{key} =", f"{key} = \x1b"):
        _, why = parse_site(f"\n{text}".encode())
        assert why.startswith(f"/etc/jit-ckpt.conf:2: cannot use key '{key}'")
        assert allowed in why
        assert why.isprintable()


@pytest.mark.parametrize(
    ("text", "partitions", "enabled"),
    [
        ("", "gpu", False),
        ("enable = off", "gpu", False),
        ("enable = on", "", True),
        (ENABLED, "gpu", True),
        (ENABLED, "cpu,long", True),
        (ENABLED, "gp", False),
        (ENABLED, "gpus", False),
        (ENABLED, "", True),
        ("enable = gpu", "", False),
        ("enable = gpu", ",", False),
    ],
)
def test_for_whom_the_option_is_on(
    library: ctypes.CDLL, parse_site: Parse, text: str, partitions: str, enabled: bool
) -> None:
    """Nobody, everybody, or the jobs of some partitions; a job that names none goes to the default one."""
    values, why = parse_site(text.encode())
    assert why == ""
    library.jit_site_enables.restype = ctypes.c_bool
    assert library.jit_site_enables(ctypes.byref(values), partitions.encode()) is enabled


def test_arguments_win_over_the_file(load: Load, tmp_path: Path) -> None:
    """The line in plugstack.conf may name another file and another directory of srun, and overrides what is in it."""
    file = tmp_path / "site.conf"
    file.write_text("keep = 3\nenable = on\n")
    values, why = load(f"conf={file}", "enable=a,b", "shim-dir=/x", "requeues=7")
    assert why == ""
    assert c_says(values) == {"keep": b"3", "enable": b"a,b", "requeues": b"7"}
    assert values.shim_dir == b"/x"
    assert load(f"conf={tmp_path}/none")[1] == ""


def test_what_is_wrong_with_arguments_is_named(load: Load, tmp_path: Path) -> None:
    """A bad argument is refused like a bad line; the hooks never see arguments, so their keys have no place there."""
    conf = f"conf={tmp_path}/none"
    assert load(conf, "keep=0")[1].startswith("plugstack.conf: cannot use key 'keep' with value '0'")
    assert load(conf, "kep=0")[1].startswith("plugstack.conf: cannot use key 'kep': unknown")
    assert load(conf, "drain=off")[1] == "plugstack.conf: cannot use key 'drain' here: the hooks read the file only"


def test_a_file_that_others_can_write_is_refused(load: Load, tmp_path: Path) -> None:
    """As in Python: group or others that may write, a folder, a FIFO; nothing hangs, no descriptor stays open."""
    file, fifo = tmp_path / "site.conf", tmp_path / "fifo"
    file.write_text("keep = 3\n")
    os.mkfifo(fifo, 0o600)
    before = sorted(os.listdir("/proc/self/fd"))
    for mode in (0o664, 0o646):
        file.chmod(mode)
        assert load(f"conf={file}")[1] == f"{file}: cannot trust it: others than root can write it"
    for other in (tmp_path, fifo):
        assert load(f"conf={other}")[1] == f"{other}: cannot read it: not a file"
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_limits(library: ctypes.CDLL, parse_site: Parse, canonical: Any, tmp_path: Path) -> None:
    """Above the site's limit is refused with key, value and limit; a default is cut to the limit."""
    values, _ = parse_site(b"max-keep = 3\nkeep = 9\nmax-requeues = 4\nmax-spares = 1\nsettle = 7")
    options, why = type(values.options)(), ctypes.create_string_buffer(2048)
    assert library.jit_options_parse(ctypes.byref(options), b"spares=2", why) == 0
    assert library.jit_site_limit(ctypes.byref(values), ctypes.byref(options), why) != 0
    assert why.value == b"cannot use key 'spares' with value '2': this site allows at most 1"
    assert library.jit_options_parse(ctypes.byref(options), b"dir=/d,spares=1", why) == 0
    assert library.jit_site_limit(ctypes.byref(values), ctypes.byref(options), why) == 0
    library.jit_site_fill(ctypes.byref(values), ctypes.byref(options))
    out = ctypes.create_string_buffer(9000)
    library.jit_options_format(ctypes.byref(options), out, ctypes.c_size_t(len(out)))
    assert out.value == b"dir=/d,keep=3,requeues=4,settle=7,spares=1"


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Site's files, scripts and command lines of random bytes under both sanitizers: no finding, the same verdicts."""
    program = tmp_path / "driver"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [str(Path(__file__).with_name("files_driver.c")), *(str(SPANK / name) for name in FREE_OF_SLURM)]
    subprocess.run(["gcc", *flags, f"-I{SPANK}", *sources, "-o", str(program)], check=True, timeout=120)
    draw = random.Random(2024)
    words = [*KEYS, "#SBATCH", "--partition", "-p", "-t", "1-2:3", ":", "hetjob", "'", '"', "\\", "--jit-ckpt=off"]
    texts = [b"", b"x" * 70_000, b"#SBATCH -p " + b"x" * 60_000, b"dir=/" + b"x" * 5000, b"#SBATCH --time=" + b"9" * 40]
    for _ in range(600):
        text = bytearray()
        for _ in range(draw.randrange(6)):
            parts = [
                draw.choice(words),
                draw.choice(["=", " ", " = ", ""]),
                draw.choice(VALUES),
                draw.choice(["\n", " ", ""]),
            ]
            text += "".join(parts).encode()
        for _ in range(draw.randrange(3) if text else 0):
            text[draw.randrange(len(text))] = draw.randrange(256)
        texts.append(bytes(text))
    paths = [tmp_path / f"{number}" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    done = subprocess.run([program, *paths], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for text, answer in zip(texts, done.stdout.split(), strict=True):
        assert (answer == "0") == (python_says(text)[1] == ""), text
