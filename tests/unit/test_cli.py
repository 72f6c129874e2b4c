from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitmpi import cli

REPO = Path(cli.__file__).parents[1]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names each command in a line of its own and ends with 0."""
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("  ")] == list(cli.COMMANDS)


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["--json"]])
def test_wrong_usage_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No command, or one that there is not, shows the usage on standard error."""
    assert cli.main(words) == 2
    assert "usage: jit-ckpt COMMAND" in capsys.readouterr().err


def test_the_distributions_python_is_enough_to_start(tmp_path: Path) -> None:
    """Without h5py, numpy and torch the command starts; only what reads checkpoints needs more."""
    code = f"import sys; sys.path.insert(0, {str(REPO)!r}); from jitmpi import cli; sys.exit(cli.main(['--help']))"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-B", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1:strict", "ascii:strict"])
def test_any_path_can_be_shown(tmp_path: Path, encoding: str) -> None:
    """Bytes that are no text, and characters that the terminal lacks, are written in ASCII."""
    conf = tmp_path / "jit-ckpt.conf"
    conf.write_bytes(b"dir = /\xe9/\xe2\x82\xac\n")
    conf.chmod(0o644)
    line = [sys.executable, "-m", "jitmpi.cli", "config", "--conf", str(conf)]
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(line, env=environ, capture_output=True, timeout=60, check=True)
    assert rb"/\udce9/" in done.stdout
