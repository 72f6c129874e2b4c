"""The site's own checks: run, judged, and never trusted beyond root."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_plugin.evidence import BAD, NOTE, Finding
from slurm_plugin.site_checks import begin

ME = os.geteuid()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty checks.d."""
    path = tmp_path / "checks.d"
    path.mkdir(mode=0o755)
    return path


def put(folder: Path, name: str, text: str, mode: int = 0o755) -> None:
    """Install a check."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(mode)


def look(folder: Path, patience: float = 10.0, owner: int = ME) -> list[Finding]:
    """Run them all."""
    return begin(str(folder), time.monotonic() + patience, {"SLURM_JOB_ID": "17", "JIT_CKPT_HOOK": "prolog"}, owner)()


def test_the_exit_code_is_the_verdict(folder: Path) -> None:
    """0 is fine, 1 is bad with the first line as the reason, anything else is the check's own failure."""
    put(folder, "a-fine", "echo all is well; exit 0")
    put(folder, "b-bad", "echo fan 3 stands still; echo more; exit 1")
    put(folder, "c-broken", "echo no such tool; exit 127")
    put(folder, "d-killed", "kill -SEGV $$")
    assert [(f.grade, f.what) for f in look(folder)] == [
        (BAD, "b-bad: fan 3 stands still"),
        (NOTE, "c-broken ended with 127, which says nothing of the node: no such tool"),
        (NOTE, "d-killed ended with 139, which says nothing of the node"),
    ]


@pytest.mark.parametrize("name", [".fan", "fan~", "fan.bak", "fan.orig", "fan.rpmsave", "fan.dpkg-old", "fan.ucf-dist"])
def test_what_was_put_aside_is_not_run(folder: Path, name: str) -> None:
    """The old version of a check, beside the new one, knows nothing of the node any more."""
    put(folder, name, "exit 1")
    put(folder, "fan.new.sh", "exit 0")
    assert look(folder) == []


def test_one_that_hangs_says_nothing_and_delays_nobody(folder: Path) -> None:
    """They run side by side, until one deadline."""
    for name in "abc":
        put(folder, name, "sleep 300")
    put(folder, "d", "exit 1")
    begun = time.monotonic()
    assert [f.grade for f in look(folder, 3)].count(BAD) == 1
    assert time.monotonic() - begun < 30


def test_they_learn_the_occasion_and_nothing_else(folder: Path) -> None:
    """The job's environment stays outside."""
    os.environ["SLURM_SPANK_EVIL"] = "x"
    put(folder, "a", 'echo "$SLURM_JOB_ID $JIT_CKPT_HOOK $SLURM_SPANK_EVIL $HOME"; exit 1')
    assert look(folder)[0].what == "a: 17 prolog"


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_what_others_can_write_is_not_run(folder: Path, tmp_path: Path, mode: int) -> None:
    """A file, or the folder, that anybody else may change runs nothing as root, and the log says so."""
    put(folder, "a", f"touch {tmp_path}/ran", mode)
    assert [f.grade for f in look(folder)] == [NOTE]
    put(folder, "a", f"touch {tmp_path}/ran")
    folder.chmod(mode)
    assert [f.grade for f in look(folder)] == [NOTE]
    folder.chmod(0o755)
    assert [f.grade for f in look(folder, owner=ME + 1)] == [NOTE]
    assert not (tmp_path / "ran").exists()


def test_links_and_what_is_no_program_are_left_out(folder: Path, tmp_path: Path) -> None:
    """A link may lead anywhere; README files and editors' leavings are no checks; no folder means no checks."""
    put(tmp_path, "elsewhere", f"touch {tmp_path}/ran; exit 1")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    put(folder, "README", "exit 1", 0o644)
    put(folder, "a~", "exit 1")
    put(folder, ".hidden", "exit 1")
    (folder / "binary").write_bytes(b"\x7fELF damaged")
    (folder / "binary").chmod(0o755)
    found = look(folder)
    assert {f.grade for f in found} == {NOTE}
    assert {f.what.split()[0].rpartition("/")[2] for f in found} == {"link", "binary"}
    assert not (tmp_path / "ran").exists()
    assert look(tmp_path / "none") == []
