"""sbatch and salloc on a real cluster: what the option sets, refuses, carries, and leaves alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_plugin import contract

pytestmark = pytest.mark.slurm
Site = Any  # conftest.Site
Listed = Callable[[str], dict[str, str]]
# Absolute paths: with --export=NONE a step has no PATH.
NAMES = "JIT_|_?SLURM_SPANK|SPANK|SBATCH_|SALLOC_|SLURM_(NO_KILL|KILL_BAD|WAIT)"
SHOW = f"/usr/bin/env | /usr/bin/grep -E '^({NAMES})' || true"
SHOW_IN_STEP = f'srun -n1 /bin/bash -c "{SHOW}"'


def values(text: str) -> dict[str, str]:
    """Lines of `env` as a dictionary."""
    return dict(line.partition("=")[::2] for line in text.splitlines())


def script(site: Site, name: str, text: str) -> str:
    """Write a batch script."""
    path = site.pfs / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    return str(path)


def test_command_line_keeps_the_job(site: Site, listed: Listed) -> None:
    """`sbatch --jit-ckpt` sets no-kill, requeue and append, on a site where requeue is off."""
    said = site.run("sbatch", "-vv", "-H", "--jit-ckpt", script(site, "plain.sh", "true")).stdout
    options = listed(said)
    assert (options["no-kill"], options["requeue"], options["open-mode"]) == ("set", "requeue", "a")
    job = said.split()[-1]
    assert site.cluster.job(job)["Requeue"] == "1"
    site.run("scancel", job)


def test_script_line_keeps_the_job(site: Site, listed: Listed) -> None:
    """`#SBATCH --jit-ckpt=...` sets the same."""
    path = script(site, "line.sh", f"#SBATCH --jit-ckpt=keep=3,dir={site.pfs}/line\ntrue")
    said = site.run("sbatch", "-vv", "-H", path).stdout
    options = listed(said)
    assert (options["no-kill"], options["requeue"], options["open-mode"]) == ("set", "requeue", "a")
    site.run("scancel", said.split()[-1])


def test_explicit_choice_stays(site: Site, listed: Listed) -> None:
    """Options of the command line and SBATCH_* variables of the user win over ours."""
    path = script(site, "plain.sh", "true")
    said = site.run("sbatch", "-vv", "-H", "--no-requeue", "--jit-ckpt", path, SBATCH_OPEN_MODE="truncate").stdout
    options = listed(said)
    assert (options["no-kill"], options["requeue"], options["open-mode"]) == ("set", "no-requeue", "t")
    site.run("scancel", said.split()[-1])
    said = site.run("sbatch", "-vv", "-H", "--jit-ckpt", path, SBATCH_NO_REQUEUE="").stdout
    assert listed(said).get("requeue") != "requeue"
    site.run("scancel", said.split()[-1])


REFUSED = [
    ("kep=3", "cannot use key 'kep': unknown; allowed keys: dir, keep,"),
    ("keep=0", "cannot use key 'keep' with value '0'; allowed: a whole number from 1 to 1000"),
    ("keep", "cannot use key 'keep': it needs a value: a whole number from 1 to 1000"),
    ("hang=1", "cannot use key 'hang' with value '1'; allowed: off or a number from 2 to 1000"),
    ("relaunch=maybe", "cannot use key 'relaunch' with value 'maybe'; allowed: on or off"),
    ("dir=/no/such/place", "cannot create directory '/no/such/place': No such file or directory"),
    ("dir=/etc/hosts", "cannot use directory '/etc/hosts': Not a directory"),
    ("dir=/usr", "cannot write to directory '/usr': Permission denied"),
    ("dir=a,b", "cannot use key 'b': unknown"),
]


NEWLINE = ("dir=a\nb", "cannot use key 'dir' with value 'a?b'; allowed: an absolute or relative path", "command line")
WAYS = ("command line", "script line")


@pytest.mark.parametrize(("text", "words", "way"), [*((*case, way) for case in REFUSED for way in WAYS), NEWLINE])
def test_refused(site: Site, text: str, words: str, way: str) -> None:
    """A bad value ends sbatch before anything is submitted; one line of ours names the key and what is allowed."""
    line = f"#SBATCH --jit-ckpt={text}\n" if way == "script line" else ""
    args = [] if line else [f"--jit-ckpt={text}"]
    done = site.run("sbatch", *args, script(site, "refused.sh", f"{line}true"), user=True)
    ours = [said for said in done.stdout.splitlines() if "jit-ckpt: " in said]
    assert done.returncode != 0
    assert len(ours) == 1
    assert ours[0].startswith(f"sbatch: error: jit-ckpt: option: {words}")
    assert "Submitted" not in done.stdout


def test_no_effect_without_the_option(site: Site, listed: Listed) -> None:
    """A job without it sees nothing of us, even where its own program takes the same word."""
    path = script(site, "without.sh", f"{SHOW}; {SHOW_IN_STEP}")
    said = site.run("sbatch", "-vv", f"--output={site.pfs}/without.out", path, "--jit-ckpt=keep=0").stdout
    assert not {"no-kill", "requeue", "open-mode"} & set(listed(said))
    job = said.split("Submitted batch job ")[1].split()[0]
    site.cluster.wait_state(job, "COMPLETED", 120)
    assert (site.pfs / "without.out").read_text() == ""
    assert "JIT" not in site.epilog(job, "n1")
    assert site.spool(job, "n1") == []
    assert site.cluster.job(job)["Requeue"] == "0"


@pytest.mark.parametrize("export", ["ALL", "NONE", "HOME,PATH"])
def test_carried_everywhere(site: Site, export: str) -> None:
    """Batch script, tasks of srun and Epilog see one text, however little of the environment is exported."""
    job = site.job(f"{SHOW}; echo --; {SHOW_IN_STEP}", f"--export={export}", "--jit-ckpt=keep=3,dir=ck")
    batch, task = (values(part) for part in site.output(job).split("--\n"))
    text = f"dir={site.pfs}/ck,keep=3"
    assert contract.parse_options(text).keep == 3
    for env in (batch, task):
        assert env[contract.ENV_OPTIONS] == env[contract.ENV_OPTIONS_JOB] == text
        assert not [name for name in env if name.startswith(("SBATCH_", "SALLOC_", "SLURM_NO_KILL", "SLURM_WAIT"))]
    assert values(site.epilog(job, "n1"))[contract.ENV_OPTIONS_HOOK] == text
    assert (site.pfs / "ck").stat().st_mode & 0o7777 == 0o700


def test_last_one_wins(site: Site) -> None:
    """The command line wins over the script."""
    text = f"#!/bin/bash\n#SBATCH --jit-ckpt=keep=3\necho ${contract.ENV_OPTIONS}\n"
    assert site.output(site.job(text, "--jit-ckpt=keep=4")).strip() == f"dir={site.pfs}/jit-ckpt,keep=4"


def test_nested_sbatch(site: Site) -> None:
    """A job submitted from within has the option only if it asks, from the batch script and from a task alike."""
    inner = script(site, "inner.sh", f"{SHOW}; {SHOW_IN_STEP}; echo end")
    plain, again = f"sbatch -o {site.pfs}/nested-%s {inner}", f"sbatch --jit-ckpt=keep=9 -o {site.pfs}/nested-a {inner}"
    site.job(
        f"export {contract.ENV_TASKS}=8\n{plain % 'b'}\nsrun -n1 {plain % 't'}\n{again}", "--jit-ckpt=keep=3", "-N1"
    )
    batch, task, asking = (site.wait_text(site.pfs / f"nested-{name}", "end\n") for name in "bta")
    assert (batch, task) == ("end\n", "end\n")
    assert values(asking)[contract.ENV_OPTIONS] == f"dir={site.pfs}/jit-ckpt,keep=9"


def test_requeue(site: Site) -> None:
    """The second run has the option still, and its output is appended to that of the first."""
    body = f"echo run ${{SLURM_RESTART_COUNT:-0}} ${contract.ENV_OPTIONS}\n[ $SLURM_RESTART_COUNT ] || exec sleep 60"
    path, text = site.pfs / "requeue.out", f"dir={site.pfs}/jit-ckpt,keep=3"
    job = site.cluster.sbatch("--jit-ckpt=keep=3", f"--output={path}", script(site, "requeue.sh", body))
    site.wait_text(path, "keep=3")
    site.run("scontrol", "requeue", job)
    site.cluster.wait_state(job, "PENDING", 120)
    time.sleep(2)  # slurmd refuses what starts within the second in which it ended the job before
    site.run("timeout", "30", "sh", "-c", f"until scontrol update JobId={job} StartTime=now; do sleep 0.2; done")
    site.cluster.wait_state(job, "COMPLETED", 120)
    runs = [line for line in path.read_text().splitlines() if line.startswith("run")]
    assert [run.split() for run in runs] == [["run", "0", text], ["run", "1", text]]


def test_salloc(site: Site, listed: Listed) -> None:
    """salloc sets no-kill, carries the option to its steps, refuses like sbatch, and leaves nothing behind."""
    shell = f"{SHOW}; echo --; {SHOW_IN_STEP}"
    said = site.run("salloc", "-vv", "--jit-ckpt=keep=3", "bash", "-c", shell).stdout
    assert listed(said)["no-kill"] == "set"
    task = values(said.split("--\n")[-1])
    assert task[contract.ENV_OPTIONS] == f"dir={site.pfs}/jit-ckpt,keep=3"
    assert "SALLOC_NO_KILL" not in said.split("end of defined options")[1]
    refused = site.run("salloc", "--jit-ckpt=keep=0", "true")
    assert refused.returncode != 0
    assert "jit-ckpt: option: cannot use key 'keep' with value '0'" in refused.stdout
