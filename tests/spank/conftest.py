"""What the tests of the plugin share: its code that knows nothing of Slurm as Python calls, and one real cluster.

The calls return the reason of a refusal, "" for none.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_plugin import contract
from testbed.cluster import Cluster
from testbed.commands import wait_for

SPANK = Path(__file__).resolve().parents[2] / "spank"
FREE_OF_SLURM = (
    *("keys.c", "options.c", "site.c", "directory.c", "arguments.c", "script.c", "settings.c", "spool.c"),
    "orphan.c",
)
TOPICS = ("other", "option", "no-kill", "requeue", "open-mode", "signal", "partition", "time", "wrap")


class Why(ctypes.Structure):
    """struct jit_why: a message of one line."""

    _fields_ = (("text", ctypes.c_char * 2048),)


class Options(ctypes.Structure):
    """struct jit_options: the values in the order of the table."""

    _fields_ = (("value", (ctypes.c_char * 4096) * len(contract.ALLOWED)),)


class SiteValues(ctypes.Structure):
    """struct jit_site: defaults of the option, the site's own values, the directory of our srun."""

    _fields_ = (
        ("options", Options),
        ("value", (ctypes.c_char * 4096) * len(contract.SITE_ALLOWED)),
        ("shim_dir", ctypes.c_char_p),
    )


class Wishes(ctypes.Structure):
    """struct jit_wishes: what a command line or #SBATCH lines say."""

    _fields_ = (
        ("said", ctypes.c_bool * len(TOPICS)),
        ("value", (ctypes.c_char * 1024) * len(TOPICS)),
        ("off", ctypes.c_bool),
        ("sbatch", ctypes.c_bool),
        ("heterogeneous", ctypes.c_bool),
        ("script", ctypes.c_char * 4096),
    )

    def told(self) -> dict[str, str]:
        """What was said, by topic."""
        pairs = zip(TOPICS, self.said, self.value, strict=True)
        found = {topic: value.value.decode() for topic, said, value in pairs if said and topic != "other"}
        return found | ({"heterogeneous": ""} if self.heterogeneous else {})


class Ended(ctypes.Structure):
    """struct jit_ended: one line of the spool."""

    _fields_ = (
        ("job", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("status", ctypes.c_int),
        ("when", ctypes.c_long),
    )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The parts of the plugin that know nothing of Slurm."""
    out = tmp_path_factory.mktemp("spank") / "libparts.so"
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-O1")
    subprocess.run(["gcc", *flags, *(str(SPANK / f) for f in FREE_OF_SLURM), "-o", str(out)], check=True, timeout=120)
    return ctypes.CDLL(str(out))


@pytest.fixture(scope="session")
def canonical(library: ctypes.CDLL) -> Callable[[str, str], tuple[str, str]]:
    """(option text, working directory) -> (canonical text, reason)."""

    def call(text: str, cwd: str) -> tuple[str, str]:
        options, why, out = Options(), Why(), ctypes.create_string_buffer(9000)
        if library.jit_options_parse(ctypes.byref(options), os.fsencode(text), ctypes.byref(why)):
            return "", why.text.decode(errors="replace")
        if library.jit_options_anchor(ctypes.byref(options), os.fsencode(cwd), ctypes.byref(why)):
            return "", why.text.decode(errors="replace")
        assert library.jit_options_format(ctypes.byref(options), out, ctypes.c_size_t(len(out))) == 0
        return os.fsdecode(out.value), ""

    return call


@pytest.fixture(scope="session")
def prepare(library: ctypes.CDLL) -> Callable[..., str]:
    """Make and check a directory, or only look whether it could be made."""

    def call(path: Path, make: bool = True) -> str:
        why = Why()
        failed = library.jit_directory_prepare(os.fsencode(path), ctypes.c_bool(make), ctypes.byref(why))
        return why.text.decode() if failed else ""

    return call


@pytest.fixture
def said_by(library: ctypes.CDLL, tmp_path: Path) -> Callable[[str], Wishes]:
    """What a command line (words apart by blanks) says to Slurm's command."""

    def call(line: str) -> Wishes:
        file, wishes = tmp_path / "cmdline", Wishes()
        file.write_bytes(b"".join(word.encode() + b"\0" for word in line.split()))
        library.jit_wishes_of_command(ctypes.byref(wishes), os.fsencode(file))
        return wishes

    return call


@pytest.fixture(scope="session")
def said_in(library: ctypes.CDLL) -> Callable[[str], dict[str, str]]:
    """What the #SBATCH lines of a script say."""

    def call(text: str) -> dict[str, str]:
        wishes = Wishes()
        library.jit_wishes_of_text(ctypes.byref(wishes), ctypes.create_string_buffer(text.encode()))
        return wishes.told()

    return call


@pytest.fixture(scope="session")
def load(library: ctypes.CDLL) -> Callable[..., tuple[SiteValues, str]]:
    """Read a site's file and plugin arguments: (values, reason)."""

    def call(*arguments: str) -> tuple[SiteValues, str]:
        values, why = SiteValues(), Why()
        words = (ctypes.c_char_p * len(arguments))(*map(os.fsencode, arguments))
        failed = library.jit_site_load(ctypes.byref(values), len(arguments), words, ctypes.byref(why))
        return values, why.text.decode(errors="replace") if failed else ""

    return call


@pytest.fixture(scope="session")
def parse_site(library: ctypes.CDLL) -> Callable[[bytes], tuple[SiteValues, str]]:
    """Read the text of a site's file: (values, reason)."""

    def call(text: bytes) -> tuple[SiteValues, str]:
        values, why = SiteValues(), Why()
        failed = library.jit_site_parse(
            ctypes.byref(values), text, ctypes.c_size_t(len(text)), b"/etc/jit-ckpt.conf", ctypes.byref(why)
        )
        return values, why.text.decode(errors="replace") if failed else ""

    return call


@pytest.fixture(scope="session")
def note(library: ctypes.CDLL) -> Callable[..., str]:
    """(spool, job, step, rank, status, when): append one line to the spool."""

    def call(spool: Path, job: int, step: int, rank: int, status: int, when: int) -> str:
        why, ended = Why(), Ended(job, step, rank, status, when)
        failed = library.jit_spool_note(os.fsencode(spool), ctypes.byref(ended), ctypes.byref(why))
        return why.text.decode() if failed else ""

    return call


# What sites change and the plugin must overcome; the Epilog is a script that shows its environment.
CONF = ("JobRequeue=0", "KillOnBadExit=1", "WaitTime=2", "Epilog={pfs}/epilog.sh", "PartitionName=other Nodes=ALL")


class Site:
    """A cluster of two nodes with the plugin and without any Python side."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pfs = cluster.pfs

    def run(self, *command: str, user: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the head to its end, whatever its end is; stderr is in the output."""
        line = ["bash", "-c", 'exec "$@" 2>&1', "-", *command]
        return self.cluster.on("head", *line, user=user, env=env, check=False)

    def job(self, script: str, *args: str, **env: str) -> str:
        """Submit a shell script, wait for its end and return its id; `output` has what it printed."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        job = self.cluster.sbatch(*args, f"--output={self.pfs}/%j.out", script=text, env=env)
        self.cluster.wait_state(job, {"COMPLETED", "FAILED"}, 120)
        return job

    def output(self, job: str) -> str:
        """What a job printed."""
        return (self.pfs / f"{job}.out").read_text()

    def wait_text(self, path: Path, text: str) -> str:
        """Wait until a file holds a text and return all it holds."""
        wait_for(f"{text!r} in {path}", lambda: path.exists() and text in path.read_text(), 120)
        return path.read_text()

    def epilog(self, job: str, node: str) -> str:
        """The environment of the Epilog of a job on a node, once it has run."""
        path = self.pfs / f"epilog-{job}-{node}"
        wait_for(f"{path}", path.exists, 120)
        return path.read_text()

    def spool(self, job: str, node: str) -> list[str]:
        """The lines of the spool of a job on a node; none where there is no file."""
        path = f"{contract.SPOOL}/{job}/{contract.TASKS}"
        return self.cluster.on(node, "cat", path, check=False).stdout.splitlines()


def settings_of(verbose: str) -> dict[str, str]:
    """The options that `sbatch -vv` lists."""
    return dict(re.findall(r"^s\w+: ([a-z-]+) +: (.*)$", verbose, re.MULTILINE))


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """One real cluster for all tests of the plugin."""
    if os.geteuid() != 0:
        pytest.skip("the test bed needs root")
    name = f"spank-{os.getpid()}"
    pfs = Cluster(name).pfs
    conf = tuple(line.format(pfs=pfs) for line in CONF)
    with Cluster(name, nodes=2, conf=conf, plugin=True, controller_hook=False, node_hook=False) as cluster:
        hook = pfs / "epilog.sh"
        aside, done = f"{pfs}/.$SLURM_JOB_ID-$SLURMD_NODENAME", f"{pfs}/epilog-$SLURM_JOB_ID-$SLURMD_NODENAME"
        hook.write_text(f"#!/bin/sh\nenv > {aside}\nmv {aside} {done}\n")
        hook.chmod(0o755)
        yield Site(cluster)


@pytest.fixture
def listed() -> Callable[[str], dict[str, str]]:
    """Read the options that `sbatch -vv` lists."""
    return settings_of
