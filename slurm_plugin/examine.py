"""Turn what Slurm and its files say into findings: texts in, findings out.

Rule 1: pure; observe.py reads, and a text that could not be read arrives as None with the reason known elsewhere.
Rule 2: a finding says what is seen in plain words, and its advice says what to change and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from slurm_plugin.findings import Finding
from slurm_plugin.plugstack import LIBRARY
from slurm_plugin.site import Site
from slurm_plugin.slurm_text import when

OLDEST: Final = (22, 5)  # the oldest Slurm that the plugin is tested with
REQUEUE_DELAY: Final = (25, 11)  # the Slurm that brought requeue_delay and expedited requeue
EXPEDITED: Final = "enable_expedited_requeue"
CRED_EXPIRE: Final = 120  # seconds; Slurm's default, and how long a requeued job waits without the controller hook
LONG: Final = 120  # seconds of SlurmdTimeout above which the wait after a lost batch host is worth a word
SKEW_NOTE, SKEW_BAD = 2.0, 60.0  # seconds between two clocks; munge refuses credentials from 300 s on
OURS: Final = ("slurm_plugin", "/jit-ckpt/")  # what a hook script of ours has in it
# key of slurm.conf -> (module, what is lost without it, verdict then)
HOOKS: Final[Mapping[str, tuple[str, str]]] = {
    "Prolog": (
        "prolog",
        "a sick node is not refused before a job starts on it, and none is told to watch the job's batch node",
    ),
    "Epilog": (
        "epilog",
        "nodes are not judged after a failure, and what jobs leave in /var/spool/jit-ckpt stays there",
    ),
    "EpilogSlurmctld": ("epilog-slurmctld", "a requeued job waits up to two minutes before it runs again"),
    "HealthCheckProgram": (
        "health-check",
        "a node that falls sick between jobs is found only by the next job, and no batch node is watched",
    ),
}


def parse_config(text: str) -> dict[str, str]:
    """Read `scontrol show config`; "(null)" is "", and of the lists of Slurm 24.11 (`Epilog[0]`) all are kept."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(r"(\w+)(?:\[\d+\])?\s*= ?(.*)", line)
        if match:
            key, value = match.group(1), match.group(2).strip().removeprefix("(null)")
            found[key] = f"{found[key]},{value}" if found.get(key) and value else found.get(key) or value
    return found


def parse_version(text: str) -> tuple[int, int] | None:
    """Read "slurm-wlm 22.05.8" or "slurm 24.11.5"."""
    found = re.search(r"\b(\d+)\.(\d+)\.\d", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def slurm(version_text: str, config: Mapping[str, str]) -> Iterator[Finding]:
    """Look at Slurm's version and whether its controller answers."""
    version = parse_version(version_text)
    if version is None:
        yield Finding("Slurm", "unknown", f"sbatch --version says {version_text!r}", "Run this where sbatch works.")
        return
    said = version_text.strip()
    controller = f", controller {config['SLURM_VERSION']}" if config.get("SLURM_VERSION") else ""
    advice = "" if version >= OLDEST else f"Slurm {_dotted(OLDEST)} or later is needed."
    yield Finding("Slurm", "ok" if version >= OLDEST else "problem", said + controller, advice)
    if not config:
        yield Finding(
            "controller", "unknown", "scontrol show config gives no answer", "Is slurmctld up, and this host allowed?"
        )


def plugin(help_text: str | None, plugstack: str | None, built: tuple[int, int] | None, slurm: str) -> list[Finding]:
    """Look at whether sbatch has loaded the plugin, and which Slurm it was built for."""
    version, found = parse_version(slurm), []
    loaded = help_text is not None and "--jit-ckpt" in help_text
    if help_text is None:
        found.append(Finding("plugin", "unknown", "sbatch --help does not answer"))
    elif loaded:
        found.append(Finding("plugin", "ok", "sbatch knows --jit-ckpt"))
    if built is not None and version is not None and built != version:
        advice = f"Build it again with the headers of Slurm {_dotted(version)}: make -C spank install."
        says = f"it was built for Slurm {_dotted(built)}, this is {_dotted(version)}: it does not load"
        found.append(Finding("plugin", "problem", says, advice))
    elif help_text is not None and not loaded:
        listed = (
            "is listed in plugstack.conf but did not load" if plugstack and LIBRARY in plugstack else "is not listed"
        )
        advice = (
            f"Put `optional <path>/{LIBRARY}` into plugstack.conf (or plugstack.conf.d, included by it) on every host "
            "with sbatch, srun or slurmd; `sbatch -vvv --test-only --wrap true` says why a listed one does not load."
        )
        found.append(Finding("plugin", "problem", f"sbatch does not know --jit-ckpt: the plugin {listed}", advice))
    if plugstack and re.search(rf"^\s*required\s+\S*{re.escape(LIBRARY)}", plugstack, re.MULTILINE):
        advice = (
            "Write `optional`: then a plugin that does not load after an upgrade costs the option, not every sbatch."
        )
        found.append(Finding("plugin", "problem", "plugstack.conf has it as `required`", advice))
    return found


def hooks(config: Mapping[str, str], read: Callable[[str], str | None]) -> Iterator[Finding]:
    """Look at the hooks; `read` gives the text of a script on this host, None where it cannot be read."""
    for key, (name, lost) in HOOKS.items():
        paths = [p for p in config.get(key, "").split(",") if p]
        texts = [read(path) for path in paths]
        advice = f"Set {key}=/usr/lib/jit-ckpt/{name} in slurm.conf, or call that from the site's own script."
        if not paths:
            yield Finding(key, "note", f"not set: {lost}", advice)
        elif any(our in text for text in [*paths, *filter(None, texts)] for our in OURS):
            yield Finding(key, "ok", config[key])
        elif None in texts:
            yield Finding(key, "note", f"{config[key]} cannot be read here; see there whether it calls jit-ckpt's")
        else:
            yield Finding(key, "note", f"{config[key]} does not call jit-ckpt's: {lost}", advice)

    if config.get("HealthCheckProgram") and not _seconds(config.get("HealthCheckInterval")):
        says = "HealthCheckInterval is 0, so Slurm never runs it"
        yield Finding("HealthCheckProgram", "note", says, "Set HealthCheckInterval=300, for example.")


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Look at what this shell would hand to sbatch and srun."""
    for name in ("SBATCH_NO_KILL", "SLURM_NO_KILL"):
        if environ.get(name) not in (None, "", "set"):  # srun(1) and sbatch(1): a value is read as an unknown option
            yield Finding(name, "problem", f"{name}={environ[name]}: Slurm refuses every job with it", f"unset {name}")
    if "SBATCH_NO_REQUEUE" in environ:
        says = "is set: a job whose failure cannot be mended in place does not come back"
        yield Finding("SBATCH_NO_REQUEUE", "note", says, "unset SBATCH_NO_REQUEUE")
    if environ.get("SLURM_MPI_TYPE"):
        says = f"{environ['SLURM_MPI_TYPE']}: srun takes it instead of MpiDefault"
        yield Finding("SLURM_MPI_TYPE", "note", says)
    yield from _pmix("SLURM_PMIX_DIRECT_CONN", environ.get("SLURM_PMIX_DIRECT_CONN", ""))
    yield from _pmix("SLURM_PMIX_FENCE", environ.get("SLURM_PMIX_FENCE", ""))


def settings(config: Mapping[str, str], version_text: str, *, expedite: bool = False) -> Iterator[Finding]:
    """Look at the settings of Slurm that decide what a failure costs; `expedite` is that of the site's file."""
    if not config:
        return
    flags = config.get("PrologFlags", "")
    if re.search(r"Alloc|Contain|X11", flags):
        yield Finding("PrologFlags", "ok", flags)
    else:
        yield Finding(
            "PrologFlags", "note", flags or "not set",
            "Set PrologFlags=Alloc or Contain: else the prolog runs on a node only when the first step starts there.",
        )  # fmt: skip
    yield from _refused(config)
    yield from _timeouts(config)
    yield _requeue(config, parse_version(version_text) or OLDEST, expedite)
    yield Finding("MpiDefault", "ok", f"{config.get('MpiDefault') or 'none'}; --probe tries what there is")
    yield Finding(
        "KillOnBadExit", "ok",
        f"{config.get('KillOnBadExit', '0')}, JobRequeue {config.get('JobRequeue', '?')}; any value: the plugin sets "
        "what jobs with the option need",
    )  # fmt: skip
    yield from _pmix("PMIxDirectConn", config.get("PMIxDirectConn", ""))
    yield from _pmix("PMIxCollFence", config.get("PMIxCollFence", ""))
    if "CANCEL" in config.get("PreemptMode", "").upper():
        yield Finding(
            "PreemptMode", "note", f"{config['PreemptMode']}: a preempted job is saved but not put back into the queue",
            "Use REQUEUE, with a GraceTime of the partition long enough for a save.",
        )  # fmt: skip


def _pmix(name: str, value: str) -> Iterator[Finding]:
    """Warn of settings under which Slurm's pmix plugin connects only steps on the first nodes of their job."""
    if value.lower() in ("no", "false", "0", "n", "tree"):
        says = f"{value}: MPI_Init may hang under --mpi=pmix where a step leaves out nodes of its job"
        yield Finding(name, "note", says, f"Leave {name} unset, or start with --mpi=none: a relaunch may do so.")


def _refused(config: Mapping[str, str]) -> Iterator[Finding]:
    """Say what becomes of a job whose prolog finds a node bad."""
    if not config.get("Prolog"):
        return
    if "nohold_on_prolog_fail" in _words(config.get("SchedulerParameters", "")):
        yield Finding("refused jobs", "ok", "a job whose prolog refuses a node goes back to the queue by itself")
        return
    ours = any(our in config.get("EpilogSlurmctld", "") for our in OURS)
    but = ", but for jobs with the option, which the controller hook releases" if ours else ""
    says = f"a job whose prolog refuses a node is held until somebody releases it{but}"
    yield Finding("refused jobs", "note", says, "Add nohold_on_prolog_fail to SchedulerParameters.")


def _timeouts(config: Mapping[str, str]) -> Iterator[Finding]:
    seconds = _seconds(config.get("SlurmdTimeout"))
    says = f"{seconds} s: how long a job waits that has lost its batch host, or the last of its spare nodes"
    if seconds == 0:
        says = "0: Slurm never notices a dead node, and a job that has lost its batch host never comes back"
        yield Finding("SlurmdTimeout", "problem", says, "Set SlurmdTimeout=60, for example.")
    elif seconds > LONG:
        yield Finding("SlurmdTimeout", "note", says, "SlurmdTimeout=60 is enough on a quiet network.")
    else:
        yield Finding("SlurmdTimeout", "ok", says)


def _requeue(config: Mapping[str, str], version: tuple[int, int], expedite: bool) -> Finding:
    if expedite:
        return _expedited(config, version)
    hooked = bool(config.get("EpilogSlurmctld"))
    parameters = config.get("SchedulerParameters", "") + "," + config.get("SlurmctldParameters", "")
    found = re.search(r"requeue_delay=(\d+)", parameters)
    expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    seconds = (
        int(found.group(1)) if found and version >= REQUEUE_DELAY else int(expire.group(1)) if expire else CRED_EXPIRE
    )
    if hooked:
        return Finding(
            "requeue", "ok", f"Slurm holds a requeued job for {seconds} s; the controller hook shortens that"
        )
    where = "requeue_delay in SchedulerParameters" if version >= REQUEUE_DELAY else "cred_expire in AuthInfo"
    return Finding(
        "requeue", "note", f"Slurm holds a requeued job for {seconds} s ({where})",
        "Set EpilogSlurmctld=/usr/lib/jit-ckpt/epilog-slurmctld: jobs with the option start again after seconds.",
    )  # fmt: skip


def _expedited(config: Mapping[str, str], version: tuple[int, int]) -> Finding:
    if version < REQUEUE_DELAY:
        says = "expedite=on, but this Slurm has no expedited requeue: jobs ask for a plain one"
        advice = (
            "It came with Slurm 25.11. Take the key out, and set EpilogSlurmctld=/usr/lib/jit-ckpt/epilog-slurmctld."
        )
        return Finding("requeue", "note", says, advice)
    if EXPEDITED not in config.get("SlurmctldParameters", "").lower():
        says = "expedite=on, but slurm.conf does not allow an expedited requeue: jobs ask for a plain one"
        return Finding("requeue", "note", says, f"Add {EXPEDITED} to SlurmctldParameters.")
    says = "expedited for jobs that ask for the option; one whose script fails is held until somebody cancels it"
    return Finding("requeue", "ok", says)


def clock(config_text: str, now: float) -> Iterator[Finding]:
    """Compare the controller's clock, which heads `scontrol show config` in whole seconds, with this host's."""
    found = re.match(r"Configuration data as of (\S+)", config_text)
    theirs = when(found.group(1) if found else "")
    if not theirs:
        return
    yield skew("clock of the controller", theirs + 0.5 - now, 0.5)


def skew(subject: str, seconds: float, grain: float = 0.0) -> Finding:
    """Judge how far another clock is from this one; `grain` is how well it is known."""
    far = max(0.0, abs(seconds) - grain)
    says = f"{far:.1f} s {'ahead of' if seconds > 0 else 'behind'} this host" if far >= 0.1 else "agrees with this host"
    if far <= SKEW_NOTE:
        return Finding(subject, "ok", says)
    advice = (
        "Let all hosts follow one time server: times in journals and logs mislead, and munge refuses from 300 s on."
    )
    return Finding(subject, "problem" if far > SKEW_BAD else "note", says, advice)


def site(path: str, found: Site | str, config: Mapping[str, str]) -> Iterator[Finding]:
    """Say what the site's file decides; `found` is what is wrong with it if it cannot be used."""
    if isinstance(found, str):
        advice = "Correct it; until then the hooks and the plugin do without it."
        yield Finding("configuration", "problem", found, advice)
        return
    given = ", ".join(f"{key}={value.value}" for key, value in found.given.items())
    yield Finding("configuration", "ok", f"{path}: {given or 'nothing is set; every default counts'}")
    filters = config.get("JobSubmitPlugins", "") + config.get("CliFilterPlugins", "")
    if config and found.adds_spares and "lua" not in filters:
        says = "adds-spares=on, but slurm.conf has neither JobSubmitPlugins=lua nor CliFilterPlugins=lua"
        yield Finding(
            "spare nodes", "problem", says, "Without it no node is added: set one of the two, or adds-spares=off."
        )


def _words(parameters: str) -> set[str]:
    return {word.strip().partition("=")[0] for word in parameters.split(",")}


def _seconds(text: str | None) -> int:
    found = re.match(r"\d+", text or "")
    return int(found.group()) if found else 0


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]:02d}"
