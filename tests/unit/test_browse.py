from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jitmpi import browse


def test_show_tells_the_story(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """show says minibatch, cause, world, sizes and times; --tensors adds the list."""
    manifest = job.checkpoint(5, 0, notes=("rank 1: its random state is a forecast",), exact=False)
    assert browse.main(["show", manifest.directory]) == 0
    text = capsys.readouterr().out
    assert "rank 1 on n2 died, n2 no longer answered, in minibatch 5: connection closed" in text
    assert "5 (the next to run)" in text
    assert "3 ranks on n1, n2, n3" in text
    assert "rank 1: its random state is a forecast" in text
    assert "saved +2.50 s" in text
    assert "bfloat16" in text
    assert "model/layer.0.weight" not in text
    assert browse.main(["show", "--tensors", job.directory]) == 0
    assert "model/layer.0.weight  bfloat16[16, 3, 2]  192 B" in capsys.readouterr().out


def test_show_json(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one value for scripts."""
    job.checkpoint(5, 0)
    assert browse.main(["show", "--json", job.directory]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert (raw["minibatch"], raw["tensors"], raw["files"]) == (5, 10, ["rank0.h5", "rank2.h5"])
    assert raw["bytes"] > raw["unique_bytes"] > 0
    assert browse.main(["show", "--json", "--tensors", job.directory]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["name"] == "model/embed.weight"


def test_verify_of_a_good_one(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """verify of a job's folder reads its newest checkpoint and ends with 0."""
    job.checkpoint(5, 0)
    job.checkpoint(6, 1)
    assert browse.main(["verify", job.directory]) == 0
    assert "m6-r1: good" in capsys.readouterr().out


def test_verify_names_file_and_dataset(job: Any, state: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage ends with 1 and is named, for people and for scripts."""
    manifest = job.checkpoint(5, 0, state)
    path = Path(manifest.directory) / "rank0.h5"
    path.write_bytes(path.read_bytes().replace(state.data[0][:32], bytes(32)))
    assert browse.main(["verify", manifest.directory]) == 1
    assert "rank0.h5: dataset model/embed.weight: differs" in capsys.readouterr().out
    assert browse.main(["verify", "--json", manifest.directory]) == 1
    raw = json.loads(capsys.readouterr().out)
    assert raw["good"] is False
    assert raw["problems"][0]["dataset"] == "model/embed.weight"


def test_a_damaged_manifest_ends_with_1(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """show, verify and ls of a checkpoint without a manifest say that it is damaged."""
    manifest = job.checkpoint(5, 0)
    os.unlink(os.path.join(manifest.directory, "manifest.json"))
    assert browse.main(["show", manifest.directory]) == 1
    assert browse.main(["verify", manifest.directory]) == 1
    assert browse.main(["ls", job.directory]) == 1
    assert "damaged" in capsys.readouterr().out


def test_ls_of_a_job_and_of_many(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """ls lists one job's checkpoints, newest first, or those of all jobs below a folder."""
    job.checkpoint(5, 0)
    job.checkpoint(6, 1)
    for directory in (job.directory, os.path.dirname(job.directory)):
        assert browse.main(["ls", directory]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:3] for line in lines[1:]] == [["7", "m6-r1", "6"], ["7", "m5-r0", "5"]]
        assert "rank 1 on n2 died" in lines[1]
    assert browse.main(["ls", "--json", job.directory]) == 0
    assert [row["minibatch"] for row in json.loads(capsys.readouterr().out)] == [6, 5]


def test_nothing_there_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is none, or holds no checkpoint, is told apart from a damaged one."""
    assert browse.main(["show", str(tmp_path / "none")]) == 2
    assert browse.main(["verify", str(tmp_path)]) == 2
    assert browse.main(["ls", str(tmp_path / "none")]) == 2
    assert browse.main(["ls", str(tmp_path)]) == 0
    assert "no checkpoint here" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        browse.main(["show"])


@pytest.mark.parametrize("command", ["show", "verify", "ls"])
def test_help_is_everywhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help works for each command, exit codes included."""
    with pytest.raises(SystemExit, match="0"):
        browse.main([command, "--help"])
    assert "Exit codes" in capsys.readouterr().out


def test_a_checkpoint_cannot_write_to_the_terminal(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Control characters in what a job wrote are not passed on."""
    job.checkpoint(5, 0, notes=("\x1b]0;owned\x07\nx",), job_id="\x1b[2J")
    for command in (["show", "--tensors"], ["ls"], ["verify"]):
        assert browse.main([*command, job.directory]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_progress_only_on_a_terminal() -> None:
    """A log file gets no progress line; a terminal gets one, cleared at the end."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        progress = browse._Progress(stream, 100)
        progress._drawn -= 1
        progress.more(50)
        progress.end()
        assert ("50%" in stream.getvalue()) is shown


def test_the_command_loads_neither_torch_nor_mpi(job: Any) -> None:
    """jit-ckpt starts fast and works where there is no torch."""
    job.checkpoint(5, 0)
    code = "import sys; from jitmpi import cli; assert cli.main(sys.argv[1:]) == 0; print(sorted(sys.modules))"
    root = Path(browse.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code, "verify", job.directory],
        capture_output=True, text=True, timeout=60, check=True, cwd=root,
    )  # fmt: skip
    assert "'torch'" not in run.stdout
    assert "mpi4py" not in run.stdout
