"""testbed/release.py: a command in another root file system leaves nothing behind. No other release is fetched here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import TestbedError
from testbed.commands import run, wait_for
from testbed.plugin import REPO
from testbed.release import CLONE, clone, enter, held

USR = Path("/usr")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The empty folders of a root file system; `USR`, seen in it, fills them."""
    root = tmp_path / "root"
    for folder in ("dev", "proc", "sys", "run", "tmp", "etc", CLONE):
        (root / folder).mkdir(parents=True)
    for folder in ("bin", "sbin", "lib", "lib64"):
        (root / folder).symlink_to(f"usr/{folder}")
    return root


def inside(root: Path, script: str) -> subprocess.Popen[str]:
    """Run a shell script in the root file system from a process of its own."""
    code = "import sys; from pathlib import Path; from testbed.release import enter\n"
    code += "sys.exit(enter(Path(sys.argv[1]), ['sh', '-c', sys.argv[2]], [Path('/usr')]))"
    command = [sys.executable, "-c", code, str(root), script]
    return subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE, start_new_session=True)


def alive(marker: str) -> list[str]:
    """The processes of this machine whose command line has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [line] if marker in line and path.parent.name != str(os.getpid()) else []
    return found


def test_command_sees_the_root_alone(root: Path) -> None:
    """It sees the root's files, its own processes, the machine's folders read-only; its exit code comes out."""
    script = """
        pwd; echo pid $$ of $(ls -d /proc/[0-9]* | wc -l); ls -A /old /etc; touch /usr/x 2>/dev/null || echo read-only
        echo text >/tmp/left; echo >/dev/null; exit 7
    """
    done = inside(root, script)
    lines = done.communicate(timeout=30)[0].splitlines()
    assert done.returncode == 7
    assert lines[0] == f"/{CLONE}"
    found = re.fullmatch(r"pid (\d+) of (\d+)", lines[1])
    assert found
    assert max(int(n) for n in found.groups()) < 20, "it sees the processes of the machine"
    assert lines[2:] == ["/etc:", "", "/old:", "read-only"]
    assert (root / "tmp" / "left").read_text() == "text\n"
    assert str(root) not in Path("/proc/self/mountinfo").read_text()


def test_tmp_is_empty_at_first(root: Path) -> None:
    """What an earlier run left in /tmp is gone before the command starts."""
    (root / "tmp" / "old" / "folder").mkdir(parents=True)
    assert enter(root, ["sh", "-c", 'test -z "$(ls -A /tmp)"'], [USR]) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_tool(root: Path, number: signal.Signals) -> None:
    """Killed in the middle, the tool takes with it every process of the command, daemons too, and every mount."""
    marker = f"release-test-{os.getpid()}-{number}"
    began = inside(root, f"setsid sh -c 'sleep 300; : {marker}' & touch /tmp/up; sleep 300; : {marker}")
    wait_for("the command", (root / "tmp" / "up").exists, 30)
    assert alive(marker)
    began.send_signal(number)
    began.communicate(timeout=30)
    wait_for("end of all its processes", lambda: not alive(marker), 30)
    assert str(root) not in Path("/proc/self/mountinfo").read_text()


def test_clone_is_the_commit(root: Path) -> None:
    """The clone has what is committed; of an earlier run only .venv is left, and unchanged files keep their times."""
    # Git shortens a name by the size of the repository.
    assert run(["git", "-C", str(REPO), "log", "-1", "--format=%H"]).stdout.startswith(clone(root).split()[0])
    folder = root / CLONE
    (folder / ".venv").mkdir()
    (folder / "left").mkdir()
    (folder / "Makefile").write_text("changed\n")
    before = (folder / "pyproject.toml").stat().st_mtime_ns
    clone(root)
    assert (folder / ".venv").exists()
    assert not (folder / "left").exists()
    assert (folder / "Makefile").read_text() == run(["git", "-C", str(REPO), "show", "HEAD:Makefile"]).stdout
    assert (folder / "pyproject.toml").stat().st_mtime_ns == before


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second run in the same root file system is refused at once instead of changing the clone under the first."""
    with held("trixie", tmp_path), pytest.raises(TestbedError, match="another run"), held("trixie", tmp_path):
        pass
