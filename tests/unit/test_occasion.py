"""What the hooks have in common: whatever is broken around them, they end well, and soon."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_plugin import hook_log, occasion
from slurm_plugin.occasion import Occasion

REPO = Path(__file__).resolve().parents[2]
BODIES = {"prolog": "refuse", "epilog": "end", "health_check": "check"}  # module -> its body
HEAVY = ("subprocess", "shutil", "json", "argparse", "socket", "threading", "logging", "tempfile", "slurm_plugin.slurm")
ENVIRON = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "17", "SLURM_JOB_UID": "1000"}

Hook = Callable[..., int]


@pytest.fixture
def hook(tmp_path: Path) -> Hook:
    """Run a body as a hook does, with a spool and a log of the test's own."""

    def run(body: Callable[[Occasion], int], conf: str = "/no/such/file", **environ: str) -> int:
        places = {"spool": str(tmp_path / "spool"), "owner": os.geteuid(), "log": str(tmp_path / "log")}
        return occasion.run("prolog", body, ["--conf", conf], {**ENVIRON, **environ}, **places)  # type: ignore[arg-type]

    return run


@pytest.fixture
def seen(hook: Hook) -> Callable[..., Occasion]:
    """The occasion that a body is given."""

    def run(*args: str, **environ: str) -> Occasion:
        got: list[Occasion] = []
        assert hook(lambda given: got.append(given) or 86, *args, **environ) == 86  # type: ignore[func-returns-value]
        return got[0]

    return run


@pytest.mark.parametrize("error", [ValueError("x"), OSError("disk"), RecursionError(), KeyError("key"), MemoryError()])
def test_our_own_errors_drain_nobody(hook: Hook, tmp_path: Path, error: Exception) -> None:
    """Any exception ends with 0, and with a line in the log."""

    def fail(given: Occasion) -> int:
        raise error

    assert hook(fail) == 0
    assert "failed, and did nothing more" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", ["n1;reboot", "../n1", "n1 n2", "-w", "n\n1", "ALL,n1"])
def test_a_node_that_is_no_name_is_not_marked(hook: Hook, name: str) -> None:
    """The hook does nothing at all."""
    assert hook(lambda given: pytest.fail("ran"), SLURMD_NODENAME=name) == 0


def test_a_malformed_file_of_the_site_means_defaults_and_no_drain(
    seen: Callable[..., Occasion], tmp_path: Path
) -> None:
    """Whoever wrote it may have meant drain = off; a file that others can write is no better. None at all is fine."""
    (tmp_path / "wrong").write_text("drain = on\nno such key = 1\n")
    (tmp_path / "open").write_text("drain = on\n")
    (tmp_path / "open").chmod(0o666)
    (tmp_path / "right").write_text("suspect-threshold = 3\n")
    assert [seen(str(tmp_path / name)).site.drain for name in ("wrong", "open", "right", "none")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert seen(str(tmp_path / "right")).site.suspect_threshold == 3
    assert (tmp_path / "log").read_text().count("draining nothing") == 2


def test_a_spool_that_cannot_be_used_is_done_without(seen: Callable[..., Occasion], tmp_path: Path) -> None:
    """Others can write it, a file is in its place: the hook goes on, and the log says so."""
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)
    assert seen().spool is None
    (tmp_path / "spool").rmdir()
    (tmp_path / "spool").write_text("")
    assert seen().spool is None
    assert (tmp_path / "log").read_text().count("going on without it") == 2


@pytest.mark.parametrize(
    ("job", "user", "told"),
    [("17", "1000", ("17", "1000")), ("1/../2", "x", ("", "")), ("٣", "", ("", "")), ("99999999999", "-1", ("", ""))],
)
def test_numbers_from_slurm_are_numbers(
    seen: Callable[..., Occasion], job: str, user: str, told: tuple[str, str]
) -> None:
    """What is none is left out."""
    given = seen(SLURM_JOB_ID=job, SLURM_JOB_UID=user)
    assert (given.job, given.user) == told


@pytest.mark.parametrize("module", BODIES)
def test_hooks_start_light(module: str) -> None:
    """Every job waits for them: nothing heavy is loaded on a healthy node, Slurm's door least of all."""
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import slurm_plugin.{module}; "
    code += "print(*sorted(set(sys.argv[2:]) & set(sys.modules)))"
    line = ["/usr/bin/python3", "-I", "-S", "-B", "-c", code, str(REPO), *HEAVY]
    assert subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout == "\n"


@pytest.mark.parametrize("module", BODIES)
def test_a_hook_is_quick(tmp_path: Path, module: str) -> None:
    """Far below what a job's start would notice, counted in CPU time; `make bench` measures how long it takes."""
    code = f"import os, sys; sys.path.insert(0, {str(REPO)!r}); from slurm_plugin import occasion, {module} as hook; "
    code += f"sys.exit(occasion.run('x', hook.{BODIES[module]}, ['--conf', '/no/such/file'], os.environ, "
    code += f"spool={str(tmp_path / 'spool')!r}, owner=os.geteuid(), log={str(tmp_path / 'log')!r}))"
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        line = ["/usr/bin/python3", "-I", "-B", "-c", code]
        done = subprocess.run(line, env=ENVIRON, capture_output=True, text=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stderr) == (0, "")
    assert min(took) < 2.0


def test_the_log_is_one_line_a_word_and_follows_nobody(tmp_path: Path) -> None:
    """Control characters do not get in, a link is not followed, and a log that cannot be written raises nothing."""
    log = tmp_path / "log"
    hook_log.write("epilog", "a\nb\x1b[31m drain = off", str(log))
    hook_log.write("epilog", "x" * 5000, str(log))
    first, second = log.read_text().splitlines()
    assert first.endswith(" epilog: a b?[31m drain = off")
    assert len(second) < 1100
    (tmp_path / "precious").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "no/such/folder", "."):
        hook_log.write("epilog", "a", str(tmp_path / name))
    assert (tmp_path / "precious").read_text() == "x"
