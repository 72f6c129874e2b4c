"""doctor: every look is a text in and findings out; the texts are those of Slurm 22.05 and 24.11."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurm_plugin import doctor, examine, inspect_host, judge, observe, plugstack, probe, probe_batch, site
from slurm_plugin.built_for import built_for
from slurm_plugin.findings import Finding, exit_code, to_json, to_text
from slurm_plugin.slurm_text import SlurmError

REPO = Path(__file__).resolve().parents[2]
CONFIG = """\
Configuration data as of 2026-11-29T20:18:09
AuthInfo                = (null)
Epilog                  = /usr/lib/jit-ckpt/epilog
EpilogSlurmctld         = (null)
HealthCheckInterval     = 300 sec
HealthCheckProgram      = /opt/site/health
JobRequeue              = 1
KillOnBadExit           = 0
MpiDefault              = pmix
PMIxCollFence           = (null)
PMIxDirectConn          = yes
Prolog                  = (null)
PrologFlags             = (null)
SLURM_VERSION           = 22.05.8
SchedulerParameters     = (null)
SlurmdTimeout           = 300 sec

Slurmctld(primary) at head is UP
"""
CONFIG_24 = CONFIG.replace(
    "Epilog                  = /usr/lib/jit-ckpt/epilog", "Epilog[0] = /opt/a\nEpilog[1] = /opt/b"
)


def verdicts(findings: Sequence[Finding]) -> dict[str, str]:
    return {finding.subject: finding.verdict for finding in findings}


def test_exit_codes() -> None:
    """0 when all is fine, notes included; 1 with a problem; 2 when something could not be checked."""
    ok, note, unknown, problem = (Finding("x", v, "") for v in ("ok", "note", "unknown", "problem"))  # type: ignore[arg-type]
    assert exit_code([]) == exit_code([ok, note]) == 0
    assert exit_code([ok, unknown]) == 2
    assert exit_code([unknown, problem]) == 1


def test_what_is_shown() -> None:
    """People get the advice under the finding, scripts one JSON value; control characters reach no terminal."""
    found = [Finding("Epilog", "note", "not \x1b[2Jset", "Set it.")]
    assert to_text(found).splitlines() == ["note     Epilog: not  [2Jset", "         -> Set it."]
    value = json.loads(to_json(found, {"probe": {"done": True}}))
    assert (value["exit_code"], value["findings"][0]["subject"], value["probe"]) == (0, "Epilog", {"done": True})


def test_config_of_both_versions() -> None:
    """(null) is empty, and the numbered hooks of Slurm 24.11 are all kept."""
    assert examine.parse_config(CONFIG)["Prolog"] == ""
    assert examine.parse_config(CONFIG)["SlurmdTimeout"] == "300 sec"
    assert examine.parse_config(CONFIG_24)["Epilog"] == "/opt/a,/opt/b"


def test_versions() -> None:
    """Slurm before 22.05 is refused, no answer is not taken for a good one."""
    assert examine.parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert examine.parse_version("slurm 24.11.5") == (24, 11)
    config = examine.parse_config(CONFIG)
    assert verdicts([*examine.slurm("slurm 21.08.8", config)]) == {"Slurm": "problem"}
    assert verdicts([*examine.slurm("slurm 24.11.5", config)]) == {"Slurm": "ok"}
    assert verdicts([*examine.slurm("no answer", config)]) == {"Slurm": "unknown"}
    assert verdicts([*examine.slurm("slurm 24.11.5", {})]) == {"Slurm": "ok", "controller": "unknown"}


@pytest.mark.parametrize(
    ("help_text", "stack", "built", "verdict", "words"),
    [
        ("--jit-ckpt=key=value", "optional /x/jit_ckpt.so", (22, 5), "ok", "knows"),
        ("", "optional /x/jit_ckpt.so", (22, 5), "problem", "did not load"),
        ("", "", None, "problem", "is not listed"),
        ("", "optional /x/jit_ckpt.so", (24, 11), "problem", "built for Slurm 24.11, this is 22.05"),
        ("--jit-ckpt", "required /x/jit_ckpt.so", (22, 5), "problem", "`required`"),
        (None, None, None, "unknown", "does not answer"),
    ],
)
def test_plugin(help_text: str | None, stack: str | None, built: Any, verdict: str, words: str) -> None:
    """Loaded, not listed, listed but not loaded, built for another Slurm, able to stop every sbatch: told apart."""
    found = examine.plugin(help_text, stack, built, "slurm 22.05.8")
    assert found[-1].verdict == verdict
    assert words in found[-1].says


def test_hooks() -> None:
    """Ours are known by path or by what the site's script calls; an unset one is a note that says what is lost."""
    texts = {"/opt/site/health": "#!/bin/sh\nexec /usr/lib/jit-ckpt/health-check\n"}
    found = [*examine.hooks(examine.parse_config(CONFIG), texts.get)]
    expected = {"Prolog": "note", "Epilog": "ok", "EpilogSlurmctld": "note", "HealthCheckProgram": "ok"}
    assert verdicts(found) == expected
    assert "sick node" in found[0].says
    foreign = [*examine.hooks({"Epilog": "/opt/e"}, {"/opt/e": "rm -rf /tmp/x"}.get)]
    assert foreign[1].says.startswith("/opt/e does not call")
    never = [
        *examine.hooks({"HealthCheckProgram": "/x/jit-ckpt/health-check", "HealthCheckInterval": "0 sec"}, texts.get)
    ]
    assert "never runs it" in never[-1].says
    unread = [*examine.hooks({"Epilog": "/opt/e"}, lambda path: None)]
    assert "cannot be read here" in unread[1].says


def test_settings() -> None:
    """Each setting that makes failures dearer is a note with what to write; a node that never dies is a problem."""
    config = examine.parse_config(CONFIG)
    found = verdicts([*examine.settings(config, "22.05.8")])
    assert (found["PrologFlags"], found["SlurmdTimeout"], found["requeue"]) == ("note", "note", "note")
    better = config | {"PrologFlags": "Alloc,Contain", "SlurmdTimeout": "60 sec", "EpilogSlurmctld": "/x"}
    assert set(verdicts([*examine.settings(better, "22.05.8")]).values()) == {"ok"}
    assert verdicts([*examine.settings(config | {"SlurmdTimeout": "0 sec"}, "22.05.8")])["SlurmdTimeout"] == "problem"
    assert "PreemptMode" in verdicts([*examine.settings(config | {"PreemptMode": "CANCEL"}, "22.05.8")])
    assert [*examine.settings({}, "22.05.8")] == []
    tree = verdicts([*examine.settings(better | {"PMIxDirectConn": "no", "PMIxCollFence": "tree"}, "22.05.8")])
    assert (tree["PMIxDirectConn"], tree["PMIxCollFence"]) == ("note", "note")


@pytest.mark.parametrize(
    ("prolog", "parameters", "hook", "verdict", "words"),
    [
        ("/x", "sched_interval=3,nohold_on_prolog_fail", "", "ok", "goes back to the queue"),
        ("/x", "", "", "note", "is held until somebody releases it"),
        ("/x", "no_nohold_on_prolog_fail", "", "note", "is held until somebody releases it"),
        ("/x", "", "/usr/lib/jit-ckpt/epilog-slurmctld", "note", "but for jobs with the option"),
    ],
)
def test_jobs_that_a_prolog_refuses(prolog: str, parameters: str, hook: str, verdict: str, words: str) -> None:
    """The doctor says in plain words what becomes of them; without a prolog nothing refuses a node."""
    config = {"Prolog": prolog, "SchedulerParameters": parameters, "EpilogSlurmctld": hook, "PrologFlags": "Alloc"}
    (found,) = (f for f in examine.settings(config, "22.05.8") if f.subject == "refused jobs")
    assert found.verdict == verdict
    assert words in found.says
    assert ("nohold_on_prolog_fail" in found.advice) == (verdict == "note")
    assert "refused jobs" not in verdicts([*examine.settings(config | {"Prolog": ""}, "22.05.8")])


@pytest.mark.parametrize(
    ("config", "version", "words"),
    [
        ({}, "22.05.8", "120 s (cred_expire"),
        ({"AuthInfo": "cred_expire=60"}, "24.11.5", "60 s (cred_expire"),
        ({"SchedulerParameters": "requeue_delay=30"}, "25.11.0", "30 s (requeue_delay"),
        ({"SchedulerParameters": "requeue_delay=30"}, "24.11.5", "120 s"),
    ],
)
def test_how_long_a_requeue_takes(config: dict[str, str], version: str, words: str) -> None:
    """The delay is read from where each version of Slurm keeps it."""
    found = [f for f in examine.settings({"PrologFlags": "Alloc", **config}, version) if f.subject == "requeue"]
    assert words in found[0].says


@pytest.mark.parametrize(
    ("parameters", "version", "verdict", "words"),
    [
        ("cloud_dns,Enable_Expedited_Requeue", "25.11.0", "ok", "one whose script fails is held"),
        ("cloud_dns", "26.05.5", "note", "slurm.conf does not allow"),
        ("enable_expedited_requeue", "24.11.5", "note", "this Slurm has no expedited requeue"),
    ],
)
def test_expedited_requeue(parameters: str, version: str, verdict: str, words: str) -> None:
    """Where the site's file asks for it, the doctor says whether Slurm gives it, and what it costs."""
    config = {"SlurmctldParameters": parameters, "PrologFlags": "Alloc"}
    (found,) = (f for f in examine.settings(config, version, expedite=True) if f.subject == "requeue")
    assert found.verdict == verdict
    assert words in found.says


def test_clocks() -> None:
    """Seconds apart are a note, minutes a problem; what is below the measure's grain is none."""
    now = time.mktime(time.strptime("2026-11-29T20:18:09", "%Y-%m-%dT%H:%M:%S"))
    assert [f.verdict for f in examine.clock(f"Configuration data as of {now + 90:.0f}\n", now)] == ["problem"]
    assert [f.verdict for later in (0.2, 5.0, 90.0) for f in examine.clock(CONFIG, now + later)] == [
        "ok",
        "note",
        "problem",
    ]
    assert [*examine.clock("", now)] == []
    assert "behind" in examine.skew("clock", -3.0).says


def test_site(tmp_path: Path) -> None:
    """What the site's file sets is shown; one that cannot be used is a problem with file, line and key."""
    path = tmp_path / "jit-ckpt.conf"
    path.write_text("keep = 3\n")
    (found,) = examine.site(str(path), site.read(str(path)), {})
    assert "keep=3" in found.says
    path.write_text("kep = 3\n")
    with pytest.raises(site.SiteError) as caught:
        site.read(str(path))
    (found,) = examine.site(str(path), str(caught.value), {})
    assert found.verdict == "problem"
    assert f"{path}:1: cannot use key 'kep'" in found.says


def test_spares_that_nobody_adds(tmp_path: Path) -> None:
    """adds-spares=on needs a lua filter in slurm.conf."""
    given = site.parse(b"adds-spares = on\n")
    config = examine.parse_config(CONFIG)
    assert verdicts([*examine.site("x", given, config)])["spare nodes"] == "problem"
    for key in ("JobSubmitPlugins", "CliFilterPlugins"):
        assert "spare nodes" not in verdicts([*examine.site("x", given, {**config, key: "lua"})])


def test_environment() -> None:
    """Variables with which Slurm refuses every job are problems; the others that matter are notes."""
    bad = {"SBATCH_NO_KILL": "1", "SLURM_NO_KILL": "set", "SBATCH_NO_REQUEUE": "", "SLURM_MPI_TYPE": "pmi2"}
    expected = {"SBATCH_NO_KILL": "problem", "SBATCH_NO_REQUEUE": "note", "SLURM_MPI_TYPE": "note"}
    assert verdicts([*examine.environment(bad)]) == expected
    assert verdicts([*examine.environment({"SLURM_PMIX_DIRECT_CONN": "false"})]) == {"SLURM_PMIX_DIRECT_CONN": "note"}
    assert [*examine.environment({"SBATCH_NO_KILL": "", "SLURM_PMIX_DIRECT_CONN": "true"})] == []


def test_directory(tmp_path: Path) -> None:
    """A folder is tried as a job would use it, and nothing of that stays."""
    found = observe.folder(str(tmp_path / "a" / "b"))
    assert (found.error, found.links, found.locks) == ("", "", "")
    assert abs(found.offset) < 60
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert verdicts([*inspect_host.directory(observe.folder(str(tmp_path / "file" / "x")))]) == {"directory": "problem"}


@pytest.mark.parametrize(
    ("folder", "verdict"),
    [
        (observe.Folder("/p", kind="lustre", free=1 << 40), "ok"),
        (observe.Folder("/p", kind="xfs", free=1 << 40), "ok"),
        (observe.Folder("/p", kind="tmpfs", free=1 << 40), "problem"),
        (observe.Folder("/p", kind="nfs4", free=1 << 32), "note"),
        (observe.Folder("/p", kind="nfs4", free=1 << 20), "problem"),
        (observe.Folder("/p", kind="vfat", free=1 << 40, links="Operation not permitted"), "problem"),
        (observe.Folder("/p", error="cannot be written: Permission denied"), "problem"),
    ],
)
def test_directories(folder: observe.Folder, verdict: str) -> None:
    """Shared, roomy, with hard links: else it is said."""
    assert next(iter(inspect_host.directory(folder))).verdict == verdict


def test_no_locks_is_a_note() -> None:
    """jit-ckpt needs none, but a user's own HDF5 programs do."""
    found = [
        *inspect_host.directory(observe.Folder("/p", kind="lustre", free=1 << 40, locks="Function not implemented"))
    ]
    assert "HDF5_USE_FILE_LOCKING=FALSE" in found[-1].advice


def test_pythons() -> None:
    """What the jobs' Python lacks is named; without mpi4py there is --mpi=none; the hooks need only a Python."""
    full = {"python": "3.11.2", "torch": "2.13", "h5py": "3.16", "numpy": "2", "mpi4py": "4.1", "mpi": "Open MPI v5, x"}
    assert set(verdicts([*inspect_host.job_python("p", full)]).values()) == {"ok"}
    bare = [*inspect_host.job_python("p", {"python": "3.11.2", "mpi_error": "ModuleNotFoundError"})]
    assert verdicts(bare) == {"Python of the jobs": "note", "MPI": "note"}
    assert "h5py" in bare[0].says
    assert "--mpi=none" in bare[1].advice
    assert verdicts([*inspect_host.job_python("p", {"python": "3.9.1"})]) == {"Python of the jobs": "problem"}
    assert verdicts([*inspect_host.job_python("p", {})]) == {"Python of the jobs": "unknown"}
    assert verdicts([*inspect_host.hook_python("p", {})]) == {"Python of the hooks": "problem"}
    assert verdicts([*inspect_host.hook_python("p", {"python": "3.11.2"})]) == {"Python of the hooks": "ok"}


def test_commands_that_hooks_do_not_find() -> None:
    """Slurm gives its hooks no PATH: what this shell finds may be nowhere for them."""
    (found,) = inspect_host.commands("/opt/site/slurm/24/bin/scontrol", None, "/usr/bin:/bin")
    assert found.verdict == "problem"
    assert "/opt/site/slurm/24/bin/scontrol" in found.says
    assert not [*inspect_host.commands("/opt/slurm/bin/scontrol", "/opt/slurm/bin/scontrol", "/opt/slurm/bin")]
    assert not [*inspect_host.commands(None, None, "/usr/bin")]  # the version's finding tells


def test_a_python_is_asked(tmp_path: Path) -> None:
    """A real interpreter answers; one that hangs, fails or is not there does not stop the doctor."""
    assert observe.modules(sys.executable)["numpy"]
    for text in ("exec sleep 60", "exit 1", "echo 7"):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        assert observe.modules(str(path), 0.3) == {}
    assert observe.modules("/nonexistent") == {}


def test_library(tmp_path: Path) -> None:
    """The library that plugstack.conf names is found."""
    (tmp_path / "jit_ckpt.so").write_bytes(b"library")
    assert observe.library(f"optional {tmp_path}/jit_ckpt.so\n", plugstack.LIBRARY) == b"library"
    assert observe.library("optional /x/other.so\n", plugstack.LIBRARY) is None


def test_built_for(tmp_path: Path) -> None:
    """The version is read from a library's table of symbols; what is no library has none."""
    source = tmp_path / "x.c"
    source.write_text("const unsigned int other = 7; const unsigned int plugin_version = 0x180b05;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "x.so", source], check=True, timeout=60)
    assert built_for((tmp_path / "x.so").read_bytes()) == (24, 11)
    for junk in (b"", b"\x7fELF\x02\x01" + b"\xff" * 80, os.urandom(4096)):
        assert built_for(junk) is None


def rank(number: int, **more: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "node": f"n{number // 2 + 1}",
        "offset": 0.001,
        "world": "Open MPI v5",
        "state": "met",
        **more,
    }


def raw(mpi: str = "pmix", **more: Any) -> dict[str, Any]:
    survivors = [rank(n, state="survived", seen=100.02) for n in range(3)]
    reports = [*survivors, rank(3, died=100.0)]
    return {"mpi": mpi, "size": 4, "code": 0, "said": "srun: error: x\n", "reports": reports, "beside": 0.1, **more}


def test_a_good_trial() -> None:
    """Survivors, seconds and the new step are told."""
    found = judge.trial(raw())
    assert (found.trouble, found.survivors, found.of) == ("", 3, 3)
    assert "after 0.02 s; a new step began in 0.1 s" in found.says


NO_PMI = "made a world of 1 rank(s) and calls this one 0, but the step has 4"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reports": [rank(n, state="not met", error=f"MPICH {NO_PMI}") for n in range(4)]}, "4 worlds of one rank"),
        ({"reports": [rank(n, world="", error="mpi4py cannot start it") for n in range(4)]}, "cannot start it"),
        ({"reports": [{"rank": 0}, {"rank": 1}], "said": "PMIX ERROR\n"}, "while it started: PMIX ERROR"),
        ({"reports": []}, "no rank started"),
        ({"reports": [rank(n) for n in range(4)]}, "as far as the kill"),
        ({"reports": [rank(0, seen=100.0), rank(1), rank(2), rank(3, died=100.0)]}, "3 of 3 survivors were ended too"),
        ({"reports": [*(rank(n, state="not seen") for n in range(3)), rank(3, died=1.0)]}, "never saw"),
        ({"beside": None}, ""),
    ],
)
def test_what_can_go_wrong_under_a_pmi(change: dict[str, Any], words: str) -> None:
    """Singletons, an MPI that ends in its start, survivors that are killed: each is told apart."""
    given = raw(**change)
    if given["beside"] is None:
        del given["beside"]
        words = "no new step could begin"
    assert words in judge.trial(given).trouble


def test_the_default_decides_what_is_a_problem() -> None:
    """A broken PMI is a problem as the site's default, else a note; the advice names one that works."""
    bad = raw("pmix", reports=[rank(0, seen=1.0), rank(1), rank(2), rank(3, died=1.0)])
    results = {"trials": [bad, raw("none")], "done": True}
    found = judge.judge(results, "pmix", 0.0)
    assert verdicts(found)["srun --mpi=pmix"] == "problem"
    assert "jit-srun --mpi=none" in found[0].advice
    assert verdicts(judge.judge(results, "none", 0.0))["srun --mpi=pmix"] == "note"
    assert exit_code(judge.judge(results, "none", 0.0)) == 0
    assert found[-1].says == "use `jit-srun --mpi=none`"
    assert judge.judge({"trials": [bad]}, "pmix", 0.0)[-1].verdict == "problem"
    assert "MpiDefault=pmix); --mpi=none would do" in judge.judge({"trials": [raw(), raw("none")]}, "pmix", 0)[-1].says


def test_clocks_of_the_nodes() -> None:
    """Each node's clock is compared with this host's over the file system's."""
    reports = [rank(0, state="survived", seen=105.0, offset=5.0), rank(3, died=100.0, offset=0.0)]
    found = verdicts(judge.judge({"trials": [raw(reports=reports, size=2)]}, "pmix", 0.0))
    assert (found["clock of n1"], found["clock of n2"]) == ("note", "ok")


def test_a_firewall_is_named() -> None:
    """Ranks that met but cannot connect mean closed ports."""
    error = "rank(s) 0 on n1 did not connect in time"
    found = judge.judge({"trials": [raw(reports=[rank(n, error=error) for n in range(4)])]}, "pmix", 0.0)
    assert "all TCP ports" in found[0].advice


def test_types() -> None:
    """Of what `srun --mpi=list` names, those that jit-ckpt can use are tried, the best first; on 22.05 and 24.11."""
    old = "MPI plugin types are...\n\tpmix\n\tnone\n\tcray_shasta\n\tpmi2\nspecific pmix plugin versions available: v4"
    assert probe_batch.types(old) == ["pmix", "pmi2", "none"]
    assert probe_batch.types("MPI plugin types are...\n\tnone\n\tpmi2") == ["pmi2", "none"]
    assert probe_batch.types("") == []


class Sbatch:
    """A Slurm of one job; `ends` is what the job does when it is first looked at."""

    def __init__(self, ends: Any = None, refuse: str = "", state: str = "RUNNING") -> None:
        self.lines: list[list[str]] = []
        self.ends, self.refuse, self.state = ends, refuse, state
        self.folder = Path()
        self.away: tuple[int, ...] = ()  # commands that get no answer

    def __call__(self, command: Sequence[str], patience: float) -> str:
        self.lines.append(list(command))
        if command[0] != "sbatch":
            assert command[1] == "--clusters=far", "the local cluster may have a job of this number too"
        if len(self.lines) in self.away:
            raise SlurmError("slurmctld does not answer")
        if command[0] == "sbatch":
            if self.refuse:
                raise SlurmError(self.refuse)
            self.folder = Path(command[-1]).parent
            return "17;far\n"
        if command[0] == "scancel":
            self.state = "CANCELLED"
            return ""
        if self.ends:
            self.ends(self.folder)
            self.ends, self.state = None, "COMPLETED"
        return f"JobId=17 JobName=x\n   JobState={self.state} NodeList=n[1-2]\n"


def play(directory: Path, slurm: Sbatch, wait: float = 5.0, **more: Any) -> dict[str, Any]:
    said: list[str] = []
    return probe.probe(str(directory), "python3", loaded=True, wait=wait, say=said.append, run=slurm, look=0.01, **more)


def test_probe_submits_reads_and_cleans_up(tmp_path: Path) -> None:
    """The user's options for sbatch come last, the results come back, and neither job nor folder stays."""

    def ends(folder: Path) -> None:
        assert folder.stat().st_mode & 0o777 == 0o700
        probe_batch.write(str(folder), {"done": True, "trials": []})

    sbatch = Sbatch(ends)
    assert play(tmp_path / "new", sbatch, sbatch=["-p", "debug"])["done"] is True
    line = sbatch.lines[0]
    assert line[-3:-1] == ["-p", "debug"]
    assert any(word.startswith("--jit-ckpt=dir=") and word.endswith(",relaunch=off") for word in line)
    assert list(tmp_path.iterdir()) == []


def test_probe_that_does_not_start_is_cancelled(tmp_path: Path) -> None:
    """At the deadline the job is cancelled, and that is said."""
    sbatch = Sbatch(state="PENDING")
    with pytest.raises(probe.ProbeError, match="PENDING: give --wait"):
        play(tmp_path, sbatch, wait=0.05)
    assert ["scancel", "--clusters=far", "17"] in sbatch.lines
    assert list(tmp_path.iterdir()) == []


def test_probe_is_cancelled_also_when_slurm_is_away_for_a_moment(tmp_path: Path) -> None:
    """It would run on, and write into a folder that is gone."""
    sbatch = Sbatch(state="PENDING")
    sbatch.away = (2, 3)  # the look at the job, and whether Slurm answers at all
    with pytest.raises(probe.ProbeError, match="give --wait"):
        play(tmp_path, sbatch, wait=-1.0)
    assert ["scancel", "--clusters=far", "17"] in sbatch.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_doctor_that_is_told_to_end_cancels_the_probe(tmp_path: Path, number: signal.Signals) -> None:
    """Also when its terminal is closed: nothing is left behind."""
    answers = {
        "sbatch": 'case "$*" in *--version*) echo slurm 22.05.8;; *--help*) echo --jit-ckpt;; *) echo 17;; esac',
        "scontrol": '[ "$2" != job ] || printf "JobId=17 JobName=x\\n   JobState=%s\\n" "$(cat state)"',
        "scancel": "echo CANCELLED >state; echo $* >cancelled",
    }
    (tmp_path / "bin").mkdir()
    for name, text in answers.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "state").write_text("PENDING\n")
    line = [sys.executable, "-m", "slurm_plugin.doctor", "--probe", "--dir", "ckpt", "--python", "/bin/false"]
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": str(REPO)}
    with subprocess.Popen(
        line, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as one:
        assert one.stderr is not None
        for said in one.stderr:
            if "job 17 is PENDING" in said:
                one.send_signal(number)
    assert one.returncode == 130
    assert (tmp_path / "cancelled").read_text() == "17\n"
    assert not (tmp_path / "ckpt").exists()


def test_the_directory_of_a_user_is_that_of_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the password database: USER may be anybody's, or missing."""
    monkeypatch.setenv("USER", "somebody")
    mine = site.Site(option={"dir": "/scratch/%u/x-%j/y"})
    assert doctor.pattern(mine) == f"/scratch/{pwd.getpwuid(os.geteuid()).pw_name}"


def test_probe_that_sbatch_refuses(tmp_path: Path) -> None:
    """Slurm's own words are passed on."""
    with pytest.raises(probe.ProbeError, match="invalid account"):
        play(tmp_path, Sbatch(refuse="sbatch: error: invalid account"))
    assert list(tmp_path.iterdir()) == []


def test_probe_in_a_folder_that_the_nodes_do_not_see(tmp_path: Path) -> None:
    """A job that ends without a trace in the folder means that the folder is not shared."""
    with pytest.raises(probe.ProbeError, match="on a shared file system"):
        play(tmp_path, Sbatch(lambda folder: None), visible=0.05)


def test_options_for_sbatch_need_the_probe(capsys: pytest.CaptureFixture[str]) -> None:
    """What follows -- would be lost without --probe, so it is refused."""
    assert doctor.main(["doctor", "--", "-p", "debug"]) == 2
    assert "--probe" in capsys.readouterr().err
