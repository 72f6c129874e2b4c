"""What the tests of the plugin share: its code that knows nothing of Slurm as Python calls, and one real cluster.

The calls return the reason of a refusal, "" for none.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_plugin import contract

SPANK = Path(__file__).resolve().parents[2] / "spank"
FREE_OF_SLURM = ("options.c", "directory.c", "arguments.c", "settings.c", "spool.c")


class Why(ctypes.Structure):
    """struct jit_why: a message of one line."""

    _fields_ = (("text", ctypes.c_char * 2048),)


class Options(ctypes.Structure):
    """struct jit_options: the values in the order of the table."""

    _fields_ = (("value", (ctypes.c_char * 4096) * len(contract.ALLOWED)),)


class Ended(ctypes.Structure):
    """struct jit_ended: one line of the spool."""

    _fields_ = (
        ("job", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("status", ctypes.c_int),
        ("when", ctypes.c_long),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The parts of the plugin that know nothing of Slurm."""
    out = tmp_path_factory.mktemp("spank") / "libparts.so"
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-O1")
    subprocess.run(["gcc", *flags, *(str(SPANK / f) for f in FREE_OF_SLURM), "-o", str(out)], check=True, timeout=120)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="session")
def canonical(library: ctypes.CDLL) -> Callable[[str, str], tuple[str, str]]:
    """(option text, working directory) -> (canonical text, reason)."""

    def call(text: str, cwd: str) -> tuple[str, str]:
        options, why, out = Options(), Why(), ctypes.create_string_buffer(9000)
        if library.jit_options_parse(ctypes.byref(options), os.fsencode(text), ctypes.byref(why)):
            return "", why.text.decode(errors="replace")
        if library.jit_options_anchor(ctypes.byref(options), os.fsencode(cwd), ctypes.byref(why)):
            return "", why.text.decode(errors="replace")
        assert library.jit_options_format(ctypes.byref(options), out, ctypes.c_size_t(len(out))) == 0
        return os.fsdecode(out.value), ""

    return call


@pytest.fixture(scope="session")
def prepare(library: ctypes.CDLL) -> Callable[[Path], str]:
    """Make and check a directory."""

    def call(path: Path) -> str:
        why = Why()
        failed = library.jit_directory_prepare(os.fsencode(path), ctypes.byref(why))
        return why.text.decode() if failed else ""

    return call


@pytest.fixture
def given_in(library: ctypes.CDLL, tmp_path: Path) -> Callable[[str], bool]:
    """Whether a command line (words apart by blanks) gives the option to Slurm's command."""

    def call(line: str) -> bool:
        file = tmp_path / "cmdline"
        file.write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
        return bool(library.jit_arguments_given(os.fsencode(file)) & 1)

    return call


@pytest.fixture(scope="session")
def note(library: ctypes.CDLL) -> Callable[..., str]:
    """(spool, job, step, rank, status, when): append one line to the spool."""

    def call(spool: Path, job: int, step: int, rank: int, status: int, when: int) -> str:
        why, ended = Why(), Ended(job, step, rank, status, when)
        failed = library.jit_spool_note(os.fsencode(spool), ctypes.byref(ended), ctypes.byref(why))
        return why.text.decode() if failed else ""

    return call
