from __future__ import annotations

import subprocess
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
