"""jit_orphan_start: what the program that looks after a job has of slurmstepd, which is nothing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from testbed.commands import wait_for
from tests.spank.conftest import Why

JIT_TEXT_MAX = 2 * 4096 + 512


class Orphan(ctypes.Structure):
    """struct jit_orphan."""

    _fields_ = (
        ("program", ctypes.c_char * 4096),
        ("job", ctypes.c_char * 32),
        ("restarts", ctypes.c_char * 32),
        ("host", ctypes.c_char * 256),
        ("nodes", ctypes.c_char * JIT_TEXT_MAX),
        ("options", ctypes.c_char * JIT_TEXT_MAX),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
def test_it_has_no_file_of_ours(library: ctypes.CDLL, tmp_path: Path) -> None:
    """Not even one that is not closed on exec, however high: its owner could take it out of the process."""
    seen, program = tmp_path / "seen", tmp_path / "orphan"
    program.write_text(
        f"#!/bin/sh\necho /proc/$$/fd/* > {seen}.part\necho $(env) >> {seen}.part\nmv {seen}.part {seen}\n"
    )
    program.chmod(0o755)
    secret = os.open("/etc/shadow", os.O_RDONLY)
    files = [os.dup2(secret, number, inheritable=True) for number in (50, 1500)]
    orphan, why = Orphan(bytes(program), b"7", b"0", b"h", b"n1", b"dir=/x", 0, 0), Why()
    try:
        assert library.jit_orphan_start(ctypes.byref(orphan), ctypes.byref(why)) == 0, why.text
    finally:
        for file in (secret, *files):
            os.close(file)
    wait_for(f"{seen}", seen.exists, 60)
    names, environ = seen.read_text().splitlines()
    assert {"0", "1", "2"} <= (own := {Path(name).name for name in names.split()})
    assert own.isdisjoint(("50", "1500"))
    assert {word.partition("=")[0] for word in environ.split()} <= {"PATH", "SLURM_CONF", "PWD", "_", "SHLVL"}
