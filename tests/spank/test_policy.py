"""The administrator's file at submission, on a real cluster: who has the option without asking, limits, mistakes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slurm_plugin import contract

pytestmark = pytest.mark.slurm
Site = Any  # conftest.Site
Listed = Callable[[str], dict[str, str]]
OURS = {"no-kill": "set", "requeue": "requeue", "open-mode": "a"}
SHOW = "/usr/bin/env | /usr/bin/grep -E '^(JIT|SLURM_SPANK_JIT|SBATCH_)' | /usr/bin/sort; echo PATH=$PATH"
UNASKED = f"SLURM_SPANK_{contract.ENV_UNASKED}"


@pytest.fixture
def policy(site: Site) -> Iterator[Callable[[str], None]]:
    """Write the site's file; afterwards there is nothing in it."""
    yield site.cluster.write_site
    site.cluster.write_site("")


def script(site: Site, name: str, text: str) -> str:
    """Write a batch script."""
    path = site.pfs / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    return str(path)


def submitted(
    site: Site, listed: Listed, *words: str, user: bool = False, **env: str
) -> tuple[dict[str, str], str, str]:
    """Submit a held job: the settings of ours that it has, what the plugin said, and what the job carries."""
    line = f"sbatch -vv -H {shlex.join(words)}" if words[:1] != ("sh",) else words[1]
    done = site.run("bash", "-c", line, user=user, **env)
    assert done.returncode == 0, done.stdout
    options = {key: value for key, value in listed(done.stdout).items() if key in OURS}
    said = "\n".join(text for text in done.stdout.splitlines() if text.startswith(("jit-ckpt:", "sbatch: error")))
    site.run("scancel", done.stdout.split("Submitted batch job ")[1].split()[0])
    return options, said, done.stdout


def carried(site: Site, *args: str, **env: str) -> dict[str, str]:
    """What a job finds in its environment."""
    text = site.output(site.job(SHOW, *args, **env))
    return dict(line.partition("=")[::2] for line in text.splitlines())


@pytest.mark.parametrize("words", [["--requeue"], []])
def test_what_slurmctld_does_not_allow_is_not_asked_for(
    site: Site, listed: Listed, policy: Callable[[str], None], words: list[str]
) -> None:
    """`expedite = on` where Slurm is too old or its controller does not allow it: a plain requeue, and no refusal."""
    policy("expedite = on\n")
    options, said, _ = submitted(site, listed, *words, "--jit-ckpt", script(site, "expedite.sh", "true"))
    assert (options, said) == (OURS, "")


PLACES = [
    ("command line", ["-p", "other"], "", {}),
    ("variable", [], "", {"SBATCH_PARTITION": "other"}),
    ("script", [], "#SBATCH -N1 --partition=other", {}),
]


@pytest.mark.parametrize(("place", "args", "line", "env"), PLACES, ids=[p[0] for p in PLACES])
def test_on_for_a_partition(
    site: Site, policy: Any, listed: Listed, place: str, args: list[str], line: str, env: dict[str, str]
) -> None:
    """A job for an enabled partition is kept like one that asks, wherever it names the partition; others are not."""
    policy("enable = other\ndefault-partition = main\n")
    path = script(site, "partition.sh", f"{line}\ntrue")
    assert submitted(site, listed, *args, path, **env)[0] == OURS
    assert submitted(site, listed, "-p", "main", path)[0] == {}
    assert submitted(site, listed, script(site, "plain.sh", "true"))[0] == {}
    policy("enable = main\ndefault-partition = main\n")
    assert submitted(site, listed, script(site, "plain.sh", "true"))[0] == OURS


@pytest.mark.parametrize("way", ["file", "pipe"])
def test_a_script_from_standard_input_is_seen(site: Site, policy: Any, listed: Listed, way: str) -> None:
    """Its #SBATCH lines count, and sbatch still gets all of it."""
    policy("enable = other\n")
    path = script(site, "stdin.sh", "#SBATCH -p other\necho whole")
    source = f"sbatch -vv -H < {path}" if way == "file" else f"cat {path} | sbatch -vv -H"
    options, _, said = submitted(site, listed, "sh", source)
    assert options == OURS
    assert "partition           : other" in said
    job = site.job("#!/bin/bash\n#SBATCH -p other\necho whole")
    assert site.output(job) == "whole\n"


def test_what_a_job_without_asking_carries(site: Site, policy: Any) -> None:
    """The site's defaults in canonical text and a mark; its directory is not made before the job needs it."""
    policy("enable = on\nkeep = 3\nsettle = 9\n")
    env = carried(site)
    assert env["SLURM_SPANK_JIT_CKPT"] == env["JIT_CKPT"] == f"dir={site.pfs}/jit-ckpt,keep=3,settle=9"
    assert env[UNASKED] == "1"
    policy("enable = on\ndir = /var/tmp/%u-%j/ck\n")
    env = carried(site, "--jit-ckpt=keep=4")
    assert env["JIT_CKPT"] == "dir=/var/tmp/root-%j/ck,keep=4"
    assert UNASKED not in env


OFF = [("command line", ["--jit-ckpt=off"], "", {}), ("script", [], "#SBATCH --jit-ckpt=off", {})]
OFF += [("variable", [], "", {contract.ENV_WISHES: "off"})]
OFF += [("command line over script", ["--jit-ckpt=off"], "#SBATCH --jit-ckpt=keep=0", {})]


@pytest.mark.parametrize(("way", "args", "line", "env"), OFF, ids=[o[0] for o in OFF])
def test_turned_off(
    site: Site, policy: Any, listed: Listed, way: str, args: list[str], line: str, env: dict[str, str]
) -> None:
    """The user's `off` leaves the job as it would be without the plugin."""
    policy("enable = on\n")
    path = script(site, "off.sh", f"{line}\n{SHOW}\nsrun -n1 bash -c {shlex.quote(SHOW)}")
    options, said, _ = submitted(site, listed, *args, path, **env)
    assert (options, said) == ({}, "")
    job = site.cluster.sbatch(*args, f"--output={site.pfs}/off.out", path, env=env)
    site.cluster.wait_state(job, "COMPLETED", 120)
    lines = (site.pfs / "off.out").read_text().splitlines()
    assert [text for text in lines if not text.startswith(("PATH=", contract.ENV_WISHES))] == []
    assert "JIT" not in site.epilog(job, "n1").replace(contract.ENV_WISHES, "")


def test_on_again(site: Site, policy: Any, listed: Listed) -> None:
    """The command line wins over an `off` of the script or the environment."""
    path = script(site, "off.sh", "#SBATCH --jit-ckpt=off\ntrue")
    assert submitted(site, listed, "--jit-ckpt", path, **{contract.ENV_WISHES: "off"})[0] == OURS


def test_what_the_script_says_stays(site: Site, listed: Listed) -> None:
    """Settings of #SBATCH lines are the user's, though Slurm lets variables win over them."""
    path = script(site, "own.sh", "#SBATCH --no-requeue --open-mode=truncate\ntrue")
    assert submitted(site, listed, "--jit-ckpt", path)[0] == {"no-kill": "set", "open-mode": "t"}


def test_layers(site: Site, policy: Any) -> None:
    """Key by key: the site's file, then the variable, then the command line."""
    policy("keep = 3\nsettle = 9\nhang = 20\n")
    wishes = {contract.ENV_WISHES: "settle=8,hang=30"}
    assert (
        carried(site, "--jit-ckpt=hang=40", **wishes)["JIT_CKPT"] == f"dir={site.pfs}/jit-ckpt,keep=3,hang=40,settle=8"
    )
    assert carried(site, **wishes)["JIT_CKPT"] == f"dir={site.pfs}/jit-ckpt,keep=3,hang=30,settle=8"
    assert "JIT_CKPT" not in carried(site)


def test_limits(site: Site, policy: Any, listed: Listed) -> None:
    """Above the limit: refused in one line with key, value and limit; defaults stay below it."""
    policy("max-requeues = 4\nmax-spares = 1\n")
    path = script(site, "plain.sh", "true")
    done = site.run("sbatch", "--jit-ckpt=requeues=5", path)
    assert done.returncode != 0
    said = [text for text in done.stdout.splitlines() if "jit-ckpt: " in text]
    assert said == [
        "sbatch: error: jit-ckpt: option: cannot use key 'requeues' with value '5': this site allows at most 4"
    ]
    assert carried(site, "--jit-ckpt=spares=1")["JIT_CKPT"] == f"dir={site.pfs}/jit-ckpt,requeues=4,spares=1"
    said = submitted(site, listed, "--jit-ckpt=spares=1", path)[1]
    assert said == "jit-ckpt: spares=1: so many of the job's nodes are kept aside; ask for them with -N"
    policy("adds-spares = on\n")
    assert submitted(site, listed, "--jit-ckpt=spares=1", path)[1] == ""


def test_a_malformed_file_hurts_nobody(site: Site, policy: Any, listed: Listed) -> None:
    """A job with the option goes without, and one line says so with file, line and key; others see nothing."""
    policy("enable = on\nkep = 3\n")
    path, file = script(site, "plain.sh", "srun -n1 echo ran"), site.cluster.settings.site_file
    assert submitted(site, listed, path)[:2] == ({}, "")
    line = script(site, "line.sh", "#SBATCH --jit-ckpt\nsrun -n1 echo ran")
    for words in (["--jit-ckpt", path], [line]):
        options, said, _ = submitted(site, listed, *words)
        assert options == {}
        assert said.startswith(f"jit-ckpt: {file}:2: cannot use key 'kep': unknown; allowed keys: enable,")
        assert said.endswith("; this job runs unprotected")
        assert len(said.splitlines()) == 1
    job = site.job("srun -n1 /usr/bin/env | grep -c JIT_CKPT=; echo ran", "--jit-ckpt")
    assert site.output(job) == "0\nran\n"


@pytest.mark.parametrize("kind", ["malformed", "fifo"])
def test_a_file_that_breaks_under_a_waiting_job(site: Site, policy: Any, shim: str, kind: str) -> None:
    """The job keeps the option and runs with plain srun; its node stays in service; sbatch goes on."""
    waiting = site.cluster.sbatch("-H", "--jit-ckpt", f"--output={site.pfs}/%j.out", script="#!/bin/sh\nsrun -n1 env\n")
    file = site.cluster.settings.site_file
    policy("kep = 3\n")
    if kind == "fifo":
        file.unlink()
        os.mkfifo(file, 0o644)
    site.run("scontrol", "release", waiting)
    site.cluster.wait_state(waiting, "COMPLETED", 120)
    assert f"\nJIT_CKPT=dir={site.pfs}/jit-ckpt\n" in site.output(waiting)
    assert site.output(site.job("srun -n1 echo theirs")) == "theirs\n"
    assert site.output(site.job("srun -n1 echo theirs", "--jit-ckpt")) == "theirs\n"
    assert set(site.cluster.nodes().values()) <= {"idle", "completing", "allocated", "mixed"}


def test_a_directory_that_cannot_be_used(site: Site, policy: Any, listed: Listed) -> None:
    """Whoever asks is refused; whoever does not is submitted, unprotected, and told why."""
    policy("enable = on\ndir = /no/such/%u\n")
    path = script(site, "plain.sh", "true")
    options, said, _ = submitted(site, listed, path, user=True)
    assert options == {}
    assert said.startswith("jit-ckpt: cannot use directory '/no/such': No such file or directory;")
    assert said.endswith("; this job runs unprotected")
    done = site.run("sbatch", "--jit-ckpt", path, user=True)
    assert done.returncode != 0
    assert "cannot create directory '/no/such/jituser'" in done.stdout


def test_a_line_of_the_script_that_is_replaced(site: Site) -> None:
    """What the command line says instead counts alone: the line's directory need not exist, and is not made."""
    for folder in (f"{site.pfs}/unwanted", "/no/such/folder"):
        lines = f"#SBATCH --jit-ckpt=keep=5,dir={folder}\n{SHOW}"
        job = site.job(lines, f"--jit-ckpt=dir={site.pfs}/wanted", "-N1")
        assert f"JIT_CKPT=dir={site.pfs}/wanted\n" in site.output(job)
    assert not (site.pfs / "unwanted").exists()


HET = [
    ("command line", "sbatch --jit-ckpt -N1 : -N1 {plain}"),
    ("second part", "sbatch -N1 : --jit-ckpt -N1 {plain}"),
    ("script", "sbatch {script}"),
    ("pipe", "cat {script} | sbatch"),
    ("srun", "srun --jit-ckpt -N1 true : -N1 true"),
]


@pytest.mark.parametrize(("way", "line"), HET, ids=[h[0] for h in HET])
def test_heterogeneous_jobs_are_refused(site: Site, way: str, line: str) -> None:
    """In one line, before anything is submitted."""
    paths = {
        "plain": script(site, "plain.sh", "true"),
        "script": script(site, "het.sh", "#SBATCH --jit-ckpt -N1\n#SBATCH hetjob\n#SBATCH -N1\ntrue"),
    }
    done = site.run("bash", "-c", line.format(**paths))
    assert done.returncode != 0
    assert len([text for text in done.stdout.splitlines() if "cannot protect a heterogeneous job" in text]) == 1
    assert site.cluster.queue() == []


@pytest.mark.parametrize("line", ["sbatch -N1 : -N1 {plain}", "sbatch {script}"])
def test_heterogeneous_jobs_that_did_not_ask(site: Site, policy: Any, line: str) -> None:
    """They are submitted as they are, and told."""
    policy("enable = on\n")
    paths = {
        "plain": script(site, "plain.sh", "true"),
        "script": script(site, "het.sh", "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1\ntrue"),
    }
    done = site.run("bash", "-c", line.format(**paths).replace("sbatch", "sbatch -H", 1))
    assert done.returncode == 0, done.stdout
    said = [text for text in done.stdout.splitlines() if "jit-ckpt" in text]
    assert len(said) == 1
    assert said[0].endswith("this job runs unprotected")
    site.run("scancel", done.stdout.split("Submitted batch job ")[1].split()[0])


def test_interactive_commands(site: Site, policy: Any) -> None:
    """salloc and srun look at their own variable for the partition; `off` and steps of other jobs are left alone."""
    policy("enable = other\ndefault-partition = main\n")
    show = "echo got:$JIT_CKPT"
    assert f"got:dir={site.pfs}/jit-ckpt" in site.run("srun", "-p", "other", "bash", "-c", show).stdout
    assert "got:dir=" in site.run("srun", "bash", "-c", show, SLURM_PARTITION="other").stdout
    assert "got:dir=" in site.run("salloc", "srun", "bash", "-c", show, SALLOC_PARTITION="other").stdout
    assert "got:dir=" not in site.run("srun", "bash", "-c", show).stdout
    assert "got:dir=" not in site.run("srun", "-p", "other", "--jit-ckpt=off", "bash", "-c", show).stdout
    assert "got:dir=" not in site.run("salloc", "-p", "other", "--jit-ckpt=off", "srun", "bash", "-c", show).stdout
    job = site.job(f"srun -p other bash -c '{show}'", "--jit-ckpt=off", "-p", "other")
    assert site.output(job) == "got:\n"


def test_steps_of_a_job_that_did_not_ask(site: Site, policy: Any) -> None:
    """Plain srun in it keeps the site's own settings: a program that knows nothing of jitmpi must not hang."""
    policy("enable = on\n")
    dies = "srun -N2 -n2 /bin/bash -c '[ $SLURM_PROCID = 0 ] && sleep 3 && echo alive || kill -9 $$'"
    assert "alive" not in site.output(site.job(dies.replace("sleep 3", "sleep 25"), "-N2"))  # free: it is killed
    assert "alive" in site.output(site.job(dies, "-N2", "--jit-ckpt"))


@pytest.fixture
def shim(site: Site) -> Iterator[str]:
    """A directory with a srun where the plugin looks for ours."""
    folder = site.cluster.settings.folder / "bin"
    had = folder.exists()
    folder.mkdir(exist_ok=True)
    program = folder / "srun"
    before = program.read_bytes() if program.exists() else None
    program.write_text("#!/bin/sh\necho ours\n")
    program.chmod(0o755)
    yield str(folder)
    if before is None:
        program.unlink()
        if not had:
            folder.rmdir()
    else:
        program.write_bytes(before)


def test_srun_is_taken_over(site: Site, policy: Any, shim: str) -> None:
    """Our directory is first in the PATH of the batch script, whatever of the environment is exported."""
    for export in ("ALL", "NONE", "HOME"):
        job = site.job("srun true", "--jit-ckpt", f"--export={export}")
        assert site.output(job) == "ours\n"
    policy("enable = on\n")
    assert site.output(site.job("srun true")) == "ours\n"
    inner = script(site, "inner.sh", "echo $PATH; echo end")
    site.job(f"sbatch -o {site.pfs}/inner.out --jit-ckpt=off {inner}")
    assert shim not in site.wait_text(site.pfs / "inner.out", "end\n")


def test_srun_is_left_alone(site: Site, policy: Any, shim: str) -> None:
    """Without the option, with relaunch=off, where the site says so, in salloc, and by its absolute path."""
    assert site.output(site.job("srun -n1 echo theirs")) == "theirs\n"
    assert site.output(site.job("srun -n1 echo theirs", "--jit-ckpt=relaunch=off")) == "theirs\n"
    assert site.output(site.job("/usr/bin/srun -n1 echo theirs", "--jit-ckpt")) == "theirs\n"
    assert "theirs" in site.run("salloc", "--jit-ckpt", "srun", "-n1", "echo", "theirs").stdout
    policy("shim = off\n")
    assert site.output(site.job("srun -n1 echo theirs", "--jit-ckpt")) == "theirs\n"
