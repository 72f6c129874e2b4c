"""The wheel: what `pip install .` puts on a cluster, tried from a folder that has nothing to do with this checkout."""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

import pytest

import jitmpi

REPO = Path(__file__).resolve().parents[2]
BUILT = (".*", "build", "dist", "__pycache__", "*.egg-info", "*.so", "*.o", "jit-ckpt")  # as in .gitignore
PRODUCT = ("jitmpi", "slurm_plugin")
COMMANDS = {"jit-ckpt": "jitmpi.cli:main", "jit-srun": "slurm_plugin.relaunch:main"}
HOOKS = ("epilog", "epilog-slurmctld")
DISTRIBUTION = "/usr/bin/python3"  # what slurmd and slurmctld find; it has no torch, and none of a user's packages


def run(command: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without the caller's PYTHON* variables, and without any job's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM", "SPANK", "JIT_"))}
    return subprocess.run(command, cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=280, check=False)


def pip(cwd: Path, *words: str) -> None:
    """Run this environment's pip, which may fetch nothing."""
    done = run([sys.executable, "-m", "pip", *words, "--quiet", "--no-index", "--no-deps"], cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, because building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPO, folder / "sources", ignore=shutil.ignore_patterns(*BUILT))
    pip(folder, "wheel", "--no-build-isolation", "--wheel-dir", str(folder / "out"), str(folder / "sources"))
    (built,) = (folder / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a folder."""
    folder = tmp_path_factory.mktemp("installed")
    pip(folder, "install", "--target", str(folder), str(wheel))
    return folder


def about(wheel: Path, name: str) -> str:
    """Return one of the files that describe the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """Read what the wheel says of itself."""
    return email.message_from_string(about(wheel, "METADATA"))


def test_contents(wheel: Path) -> None:
    """Every module of the runtime and of the cluster's side is in the wheel, and nothing else: no tests, no testbed."""
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    modules = {f"{p}/{m.name}" for p in PRODUCT for m in (REPO / p).glob("*.py")}
    assert names == modules | {f"{p}/py.typed" for p in PRODUCT}
    assert wheel.name.endswith("-py3-none-any.whl")  # one wheel for every Python, machine and Slurm


def test_commands(wheel: Path) -> None:
    """The wheel gives two commands, jit-ckpt and jit-srun."""
    declared = configparser.ConfigParser(delimiters="=")
    declared.read_string(about(wheel, "entry_points.txt"))
    assert {s: dict(declared[s]) for s in declared.sections()} == {"console_scripts": COMMANDS}


def test_metadata(metadata: Message) -> None:
    """The wheel names its version once, its Pythons, and what it needs: pyslurm only for those who ask for it."""
    assert (metadata["Name"], metadata["Version"]) == ("jit-ckpt", jitmpi.__version__)
    assert metadata["Requires-Python"] == ">=3.11"
    needs = {re.split(r"[^\w.-]", need, maxsplit=1)[0]: need for need in metadata.get_all("Requires-Dist")}
    assert set(needs) == {"torch", "mpi4py", "h5py", "numpy", "pyslurm"}
    assert [name for name, need in needs.items() if "extra ==" in need] == ["pyslurm"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (REPO / "README.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_help(installed: Path, command: str) -> None:
    """Both commands start from where pip has put them, and tell how they are used."""
    done = run([str(installed / "bin" / command), "--help"], installed, PYTHONPATH=str(installed))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {command} ")


def test_installed_modules_are_used(installed: Path) -> None:
    """The installed packages do not reach back into a checkout."""
    code = "import jitmpi.cli, slurm_plugin.relaunch; print(jitmpi.cli.__file__, slurm_plugin.relaunch.__file__)"
    done = run([sys.executable, "-c", code], installed, PYTHONPATH=str(installed))
    assert done.stdout.split() == [str(installed / m) for m in ("jitmpi/cli.py", "slurm_plugin/relaunch.py")]


def test_cluster_side_needs_only_the_standard_library(installed: Path) -> None:
    """Every module of slurm_plugin imports under the distribution's python3, without site-packages or a warning."""
    names = sorted(f"slurm_plugin.{m.stem}" for m in (installed / "slurm_plugin").glob("*.py") if m.stem != "__init__")
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); import {', '.join(names)}; print(*sys.path)"
    done = run([DISTRIBUTION, "-I", "-S", "-B", "-W", "error", "-c", code], installed)
    assert (done.returncode, done.stderr) == (0, "")
    assert "site-packages" not in done.stdout
    assert "dist-packages" not in done.stdout


@pytest.mark.parametrize("words", [["ls", "/tmp"], ["show", "--help"], ["config"], ["doctor", "--help"]], ids=" ".join)
def test_commands_on_a_host_without_h5py(installed: Path, words: list[str]) -> None:
    """What reads checkpoints says in one line what it needs; what looks at the cluster works."""
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); from jitmpi.cli import main; sys.exit(main())"
    done = run([DISTRIBUTION, "-I", "-S", "-B", "-c", code, *words], installed)
    if words[0] in ("config", "doctor"):
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2
        assert re.fullmatch(rf"jit-ckpt: {words[0]} needs (h5py|numpy), and \S+ lacks it: .*\n", done.stderr)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks(installed: Path, hook: str) -> None:
    """The hooks run from the wheel too; for a job that is none of ours they do nothing and end with 0."""
    script = run([str(REPO / "packaging" / "wrapper"), hook, str(installed), "/nonexistent"], installed).stdout
    done = run(["/bin/sh", "-c", script], installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
