"""The node's epilog on a real file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_plugin.epilog import clear


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A spool with the folders of two jobs."""
    for job in ("7", "8"):
        (tmp_path / "spool" / job).mkdir(parents=True)
        (tmp_path / "spool" / job / "tasks").write_text("0 0 9 1.0\n")
    (tmp_path / "spool").chmod(0o700)
    return tmp_path / "spool"


def run(spool: Path, job: str) -> str:
    """Clear the spool of a job as the spool's owner."""
    return clear({"SLURM_JOB_ID": job}, str(spool), owner=os.geteuid())


def test_it_removes_what_was_kept_for_the_job_and_nothing_else(spool: Path) -> None:
    """The other job's folder stays; a second time there is nothing to do."""
    assert run(spool, "7") == ""
    assert sorted(p.name for p in spool.iterdir()) == ["8"]
    assert run(spool, "7") == ""


@pytest.mark.parametrize("job", ["", ".", "..", "7/../8", "7 8", "*", "٧"])
def test_what_is_no_number_is_no_folder(spool: Path, job: str) -> None:
    """Nothing but digits names a folder."""
    run(spool, job)
    assert sorted(p.name for p in spool.iterdir()) == ["7", "8"]


def test_no_link_is_followed(spool: Path, tmp_path: Path) -> None:
    """A link in place of the folder, inside it, or in place of the spool leads nowhere."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (spool / "9").symlink_to(precious)
    (spool / "7" / "link").symlink_to(precious)
    run(spool, "9")
    run(spool, "7")
    (tmp_path / "link").symlink_to(spool)
    assert "left alone" in run(tmp_path / "link", "8")
    assert (precious / "file").exists()
    assert sorted(p.name for p in spool.iterdir()) == ["8"]


def test_a_spool_that_others_can_write_is_left_alone(spool: Path) -> None:
    """Somebody else may have put things there."""
    spool.chmod(0o777)
    assert "left alone" in run(spool, "7")
    assert (spool / "7").exists()
    spool.chmod(0o700)
    assert "left alone" in clear({"SLURM_JOB_ID": "7"}, str(spool), owner=os.geteuid() + 1)
    assert clear({"SLURM_JOB_ID": "7"}, str(spool / "none"), owner=0) == ""
