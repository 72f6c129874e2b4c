"""packaging/wrapper: what stands between Slurm or a user and the Python code, with code and files of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from slurm_plugin import contract

WRAPPER = Path(__file__).resolve().parents[2] / "packaging" / "wrapper"
HOOKS = {
    "prolog": "prolog",
    "epilog": "epilog",
    "epilog-slurmctld": "controller_epilog",
    "health-check": "health_check",
}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the site's file counts only when root owns it")


class Installed:
    """A folder with a wrapper in it, Python code behind it, and a site's file."""

    def __init__(self, folder: Path, name: str, module: str) -> None:
        # The controller's hook starts itself once more, apart from slurmctld; this is that second start.
        self.words = ["apart"] if name == "epilog-slurmctld" else []
        self.code, self.conf, self.path = folder / "python", folder / "jit-ckpt.conf", folder / name
        self.module = self.code.joinpath(*module.split(".")).with_suffix(".py")
        self.module.parent.mkdir(parents=True)
        (self.module.parent / "__init__.py").touch()
        text = subprocess.run([WRAPPER, name, self.code, self.conf], capture_output=True, check=True, timeout=60).stdout
        self.path.write_bytes(text)
        self.path.chmod(0o755)

    def main(self, body: str) -> None:
        """Let the module's main be this."""
        self.module.write_text(f"import os, sys\ndef main():\n    {body}\n", encoding="utf-8")

    def run(self, *words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
        """Run the wrapper as Slurm would, with a hostile folder first in Python's own path."""
        env = {"PATH": path, "PYTHONPATH": "/nonexistent", "SPANK_JIT_CKPT": "dir=/x\n$(touch pwned)"}
        command = [str(self.path), *words]
        return subprocess.run(command, env=env, cwd=self.path.parent, capture_output=True, text=True, timeout=60)


@pytest.fixture(params=HOOKS)
def hook(tmp_path: Path, request: pytest.FixtureRequest) -> Installed:
    """One hook after the other."""
    return Installed(tmp_path, request.param, f"slurm_plugin.{HOOKS[request.param]}")


def test_a_hook_gets_the_site_s_file(hook: Installed) -> None:
    """The module's main runs, isolated from the environment, and is told where the site's file is."""
    seen = hook.code / "seen"
    told = "sys.argv[1:], sys.flags.isolated, sys.dont_write_bytecode, os.environ['PATH']"
    hook.main(f"print({told}, file=open({str(seen)!r}, 'w')); return 0")
    done = hook.run(*hook.words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert seen.read_text() == f"['--conf', '{hook.conf}'] 1 True /usr/sbin:/usr/bin:/sbin:/bin\n"


def test_a_bad_node_is_the_only_failure(hook: Installed) -> None:
    """Slurm is told of a failure, which drains the node, only when the module has found the node bad."""
    hook.main(f"return {contract.EXIT_NODE_BAD}")
    assert hook.run(*hook.words).returncode == 1


@pytest.mark.parametrize(
    "body",
    ["return 1", "raise OSError", "import nowhere", "this is no Python", "os._exit(255)", "os.kill(os.getpid(), 9)"],
)
def test_our_own_failure_drains_nothing(tmp_path: Path, body: str) -> None:
    """Whatever else the code ends with, Slurm sees success."""
    hook = Installed(tmp_path, "prolog", "slurm_plugin.prolog")
    hook.main(body)
    assert hook.run().returncode == 0


def test_no_code_drains_nothing(hook: Installed) -> None:
    """Code that was removed, while slurm.conf still names the hook, drains no node."""
    assert not hook.module.exists()
    assert hook.run(*hook.words).returncode == 0


@pytest.mark.parametrize("options", [None, ""])
def test_the_controller_s_hook_starts_no_python_for_other_jobs(tmp_path: Path, options: str | None) -> None:
    """A job without the option costs slurmctld one small shell."""
    hook = Installed(tmp_path, "epilog-slurmctld", "slurm_plugin.controller_epilog")
    hook.main(f"open({str(tmp_path / 'ran')!r}, 'w')")
    env = {} if options is None else {"SPANK_JIT_CKPT": options}
    for words in ([], ["apart"]):
        assert subprocess.run([hook.path, *words], env=env, timeout=60).returncode == 0
    assert not (tmp_path / "ran").exists()


def test_the_controller_s_hook_works_on_when_slurmctld_kills_it(tmp_path: Path) -> None:
    """It has ended long before its work has, which a signal for its process group does not reach."""
    hook = Installed(tmp_path, "epilog-slurmctld", "slurm_plugin.controller_epilog")
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    hook.main(f"open({str(fifo)!r}).read(); open({str(tmp_path / 'done')!r}, 'w').close(); return 0")
    env = {"SPANK_JIT_CKPT": "keep=2"}
    with subprocess.Popen([hook.path], env=env, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=60)[0] == b"", "nothing that its work holds open keeps slurmctld"
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    fifo.write_text("")
    end = time.monotonic() + 60
    while not (tmp_path / "done").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_orphan_gets_the_words_of_the_plugin(tmp_path: Path) -> None:
    """They are a job's: whatever is in them is a word and nothing else."""
    orphan = Installed(tmp_path, "orphan", "slurm_plugin.orphan")
    orphan.main("print(sys.argv[1:], sys.flags.isolated); return 0")
    words = ["7_3", "0", "-h $(touch pwned)", "n[1-2];reboot", "dir=/a b,keep=2"]
    assert orphan.run(*words).stdout == f"{words} 1\n"
    assert not (tmp_path / "pwned").exists()


@needs_root
@pytest.mark.parametrize("named", ["/nonexistent/python3", "/etc/passwd", "/", "python-of-nobody"])
def test_no_interpreter_drains_nothing(tmp_path: Path, named: str) -> None:
    """An interpreter that is missing or is none drains no node."""
    hook = Installed(tmp_path, "prolog", "slurm_plugin.prolog")
    hook.main(f"return {contract.EXIT_NODE_BAD}")
    hook.conf.write_text(f"python = {named}\n", encoding="utf-8")
    assert hook.run().returncode == 0


@needs_root
@pytest.mark.parametrize(
    "line",
    ["python = {}", "python={}", "\t python\t=\t{} \t", "python = {} # why", "# python = /no\nkeep = 3\npython = {}"],
)
def test_the_site_names_the_interpreter(tmp_path: Path, line: str) -> None:
    """The value of `python` is read as slurm_plugin/site.py reads it."""
    named = tmp_path / "py#1"  # a comment begins after a blank only
    named.symlink_to(sys.executable)
    hook = Installed(tmp_path, "prolog", "slurm_plugin.prolog")
    hook.main("print(sys.executable)")
    hook.conf.write_text(line.format(named) + "\n", encoding="utf-8")
    assert hook.run().stdout == f"{named}\n"


@needs_root
def test_the_site_names_the_interpreter_in_any_folder(tmp_path: Path) -> None:
    """Also where whoever runs it is in a folder that is closed to him."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to others as a whole
        folder = Path(name)
        folder.chmod(0o755)
        orphan = Installed(folder, "orphan", "slurm_plugin.orphan")
        named = folder / "python3"
        named.write_text("#!/bin/sh\necho named\n", encoding="utf-8")
        named.chmod(0o755)
        orphan.conf.write_text(f"python = {named}\n", encoding="utf-8")
        nobody = {"user": 65534, "group": 65534, "extra_groups": ()}
        done = subprocess.run([orphan.path], cwd=tmp_path, capture_output=True, timeout=60, **nobody)
    assert (done.stdout, done.stderr) == (b"named\n", b"")


@needs_root
def test_the_site_s_file_is_read_and_not_run(tmp_path: Path) -> None:
    """Shell text in the file does nothing but fail."""
    hook = Installed(tmp_path, "prolog", "slurm_plugin.prolog")
    hook.main("return 0")
    hook.conf.write_text("python = $(touch pwned);`touch pwned` | touch pwned\ntouch pwned\n", encoding="utf-8")
    assert hook.run().returncode == 0
    assert not (tmp_path / "pwned").exists()


@needs_root
def test_a_file_that_others_can_write_does_not_count(tmp_path: Path) -> None:
    """Root starts no interpreter that somebody else may have named."""
    hook = Installed(tmp_path, "prolog", "slurm_plugin.prolog")
    hook.main(f"return {contract.EXIT_NODE_BAD}")
    hook.conf.write_text("python = /bin/true\n", encoding="utf-8")
    assert hook.run().returncode == 0
    hook.conf.chmod(0o666)
    assert hook.run().returncode == 1, "the default interpreter runs the code"


def test_commands_pass_their_words_on(tmp_path: Path) -> None:
    """jit-ckpt and jit-srun get every word as it was typed."""
    for name, module in (("jit-ckpt", "jitmpi.cli"), ("jit-srun", "slurm_plugin.relaunch")):
        (tmp_path / name).mkdir()
        command = Installed(tmp_path / name, name, module)
        command.main("print(sys.argv[1:]); return 7")
        done = command.run("-n", "2", "a b", "", "$HOME;*")
        assert (done.returncode, done.stdout) == (7, "['-n', '2', 'a b', '', '$HOME;*']\n")


def test_jit_srun_without_python_is_srun(tmp_path: Path) -> None:
    """On a node that lacks our code a batch script still starts its ranks."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "srun $*"\n', encoding="utf-8")
    (tmp_path / "srun").chmod(0o755)
    command = Installed(tmp_path, "jit-srun", "slurm_plugin.relaunch")
    done = command.run("-n", "2", "true", path=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, "srun -n 2 true\n")
    assert done.stderr.startswith("jit-srun: ")


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """A misspelt hook gives no wrapper."""
    done = subprocess.run([WRAPPER, "prologue"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "prologue is none of" in done.stderr
