"""What Prolog, Epilog and HealthCheckProgram have in common: who they run for, and what follows from what they find.

Rule 1: a hook ends with 0, or with EXIT_NODE_BAD when the node is bad and Slurm itself must act on that. A bug of
        ours, a malformed file, a spool that cannot be used: a line in the log, and 0.
Rule 2: only the node that the hook runs on is ever marked. Its name comes from slurmd, never from a job.
Rule 3: a healthy node costs no question to Slurm; its door is not even imported.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from slurm_plugin import checks, contract, health, hook_log, kernel_log, suspicion
from slurm_plugin import site as sites
from slurm_plugin.evidence import BAD, NOTE, SUSPECT, Finding, plain
from slurm_plugin.health import Verdict
from slurm_plugin.site import Site, SiteError
from slurm_plugin.spool import Spool, SpoolError

if TYPE_CHECKING:
    from slurm_plugin.slurm import Slurm

LAST_RESORT: Final = 300  # seconds; then the kernel ends a hook that hangs, for example in a disk of ours
DOOR_PATIENCE: Final = 5.0  # seconds a question to Slurm may take from a hook: many nodes may ask at once
HOUR: Final = 3600.0
BEGAN: Final = "{job}/began"  # in the spool: where the kernel's log stood when the job began
JUDGED: Final = "kernel-log"  # in the spool: up to where the kernel's log has led to a verdict
_JOB: Final = re.compile(r"\d{1,10}", re.ASCII)
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Occasion:
    """One run of a hook.

    Attributes:
        hook: "prolog", "epilog" or "health-check".
        job, user: numbers as text, "" for none.
        spool: None where it cannot be used.
        say: writes a line into the log.
        open_door: opens the way to Slurm, once it is needed.
        given: where the checks look, instead of this machine; tests use it.
    """

    hook: str
    node: str
    site: Site
    say: Callable[[str], None]
    open_door: Callable[[], Slurm]
    job: str = ""
    user: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    spool: Spool | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    def look(self, since: int | None = None) -> checks.Seen:
        """Run the checks; notes go to the log. `since`: the kernel's log counts from that record on."""
        at = checks.Look(self.hook, self.node, self.site, self.job, self.environ, self.spool, since)
        seen = checks.look(replace(at, **self.given))  # type: ignore[arg-type]
        for finding in seen.findings:
            if finding.grade == NOTE:
                self.say(f"{finding.check}: {finding.what}")
        return seen

    def mark(self, verdict: Verdict) -> bool:
        """Drain this node for a bad verdict; False if Slurm could not be told."""
        from slurm_plugin.marking import mark  # Rule 3
        from slurm_plugin.slurm_text import SlurmError

        reason = health.reason(verdict, self.job)
        try:
            self.say(mark(self.open_door(), self.node, reason))
        except SlurmError as error:
            self.say(f"cannot drain {self.node} ({reason}): {error}")
            return False
        return True

    def weigh(self, findings: Sequence[Finding], now: float) -> float:
        """Count the suspicions among the findings in the spool; return the weight of all that are counted there."""
        new = [f for f in findings if f.grade == SUSPECT]
        if not new or not self.spool:
            return float(bool(new))
        half_life = max(self.site.suspect_half_life * HOUR, 1.0)
        lock = self.spool.lock()
        try:
            entries = suspicion.parse(self.spool.read(suspicion.FILE))
            for finding in new:
                who = f"uid-{self.user}" if finding.check == "tasks" else finding.check
                entries = suspicion.add(entries, suspicion.Suspicion(now, who, plain(finding.what)), half_life)
            self.spool.write(suspicion.FILE, suspicion.write(entries))
        finally:
            os.close(lock)
        return suspicion.score(entries, now, half_life)

    def forgive(self) -> None:
        """Forget the suspicions: they have led to a drain, and whoever ends that begins anew."""
        if self.spool and self.spool.read(suspicion.FILE):
            self.spool.write(suspicion.FILE, b"")


def verdict_of(occasion: Occasion, findings: Sequence[Finding], now: float | None = None) -> Verdict:
    """Judge this node by the findings, and by the suspicions that were counted before."""
    try:
        score = occasion.weigh(findings, time.time() if now is None else now)
    except SpoolError as error:
        occasion.say(f"suspicions cannot be counted: {error}")
        score = 0.0
    return health.judge(findings, score=score, threshold=occasion.site.suspect_threshold)


def act(occasion: Occasion, verdict: Verdict) -> bool:
    """Log the verdict and drain a bad node; False if it should be drained and could not."""
    if verdict.state == health.HEALTHY:
        return True
    behind = f" (job {occasion.job})" if occasion.job else ""
    occasion.say(f"{occasion.node} is {verdict.state}: {verdict.evidence}{behind}")
    if verdict.state != BAD:
        return True
    if not occasion.site.drain:
        occasion.say("not drained: drain = off")
        return True
    if not occasion.mark(verdict):
        return False
    try:
        occasion.forgive()
    except SpoolError as error:
        occasion.say(str(error))
    return True


def kernel_begin(occasion: Occasion) -> int | None:
    """Return the record after which the kernel's log counts: of this boot, and after what has been judged before.

    A job's hook counts from the job's beginning; without a job everything since the last verdict counts. None: unknown.
    """
    if not occasion.spool:
        return None
    names = [JUDGED, BEGAN.format(job=occasion.job)] if occasion.job else [JUDGED]
    try:
        boot = kernel_log.boot_id()
        found = [kernel_log.parse_position(occasion.spool.read(name)) for name in names]
    except (OSError, SpoolError) as error:
        occasion.say(f"the kernel's log is left out: {error}")
        return None
    numbers = [p.number if p and p.boot == boot else None for p in found]
    if numbers[-1] is None:  # the job began before we were installed, or nothing was ever judged in this boot
        return None
    return max(n for n in numbers if n is not None)


def kernel_judged(occasion: Occasion, last: int | None) -> None:
    """Remember that the kernel's log has led to a verdict up to record `last`: each message counts once."""
    if not occasion.spool or last is None:
        return
    try:
        position = kernel_log.Position(kernel_log.boot_id(), last)
        occasion.spool.write(JUDGED, kernel_log.write_position(position))
    except (OSError, SpoolError) as error:
        occasion.say(str(error))


def main(hook: str, body: Callable[[Occasion], int]) -> int:
    """Run a hook as slurmd's child."""
    signal.alarm(LAST_RESORT)
    return run(hook, body, sys.argv[1:], os.environ)


def run(
    hook: str,
    body: Callable[[Occasion], int],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    spool: str = contract.SPOOL,
    owner: int = 0,
    log: str = hook_log.LOG,
) -> int:
    """Run a hook's body for the occasion that Slurm's environment describes, and return the exit code; Rule 1."""

    def say(text: str) -> None:
        hook_log.write(hook, text, log)

    try:
        site = _site(argv[argv.index("--conf") + 1] if "--conf" in argv[:-1] else contract.SITE, say)
        job, user = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_JOB_UID")
        return body(
            Occasion(hook, _node(environ), site, say, _door, job, user, environ, _spool(hook, spool, owner, say))
        )
    except Exception as error:
        say(f"failed, and did nothing more: {error!r}")
        return 0


def _spool(hook: str, path: str, owner: int, say: Callable[[str], None]) -> Spool | None:
    try:
        return Spool(path, owner, make=hook == "prolog")  # it comes first; where it has never run there is none
    except FileNotFoundError:
        return None
    except SpoolError as error:
        say(f"{error}; going on without it")
        return None


def _site(path: str, say: Callable[[str], None]) -> Site:
    try:
        return sites.read(path)
    except SiteError as error:
        say(f"{error}; going on with the defaults, and draining nothing")
        return Site(drain=False)


def _door() -> Slurm:
    from slurm_plugin.slurm import open_slurm  # Rule 3

    return open_slurm(DOOR_PATIENCE)


def _node(environ: Mapping[str, str]) -> str:
    name = environ.get("SLURMD_NODENAME", "") or os.uname().nodename.partition(".")[0]
    if not _NODE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a node")
    return name


def _number(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name, "")
    return text if _JOB.fullmatch(text) else ""
