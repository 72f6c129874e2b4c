"""Tell the trainings of one job apart: which directory belongs to the srun that is about to start.

    <dir>/<job>  <dir>/<job>.2  <dir>/<job>.3  ...  one for each training that a batch script starts

Rule 1: in one life of the job (between two ways through the queue) no directory is given twice, except to the same
    command with the same environment after it failed: the script tries again.
Rule 2: a later life finds the directory by the command line and the folder; among those by the environment. Where
    words change from life to life (a port, an address), the one it resembles most counts if it was interrupted.
Rule 3: when in doubt the training begins anew: a lost checkpoint costs time, a wrong one the result.
Rule 4: a training that ended well is passed over in the next life of the job where another one of the script was not
    finished, or where slurmctld, killed before it had written the job's end down, has started the job again. Where
    the job is put back on purpose (a script that requeues itself, say) it begins anew, in a new directory. So does a
    program that trained nothing: what it left may be on nodes that the job no longer has.
Rule 5: clusters that share a file system give the same numbers to different jobs: what another cluster's job left is
    nobody's, and its directory's name is taken. Numbers of a federation are unique, and its jobs may move.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slurm_plugin import contract, hold, journal, outcomes
from slurm_plugin.hold import Hold
from slurm_plugin.journal import Journal
from slurm_plugin.told import say

# What differs between two sruns of one script, or two lives of a job, without making them two trainings.
PASSING: Final = re.compile(
    r"(SLURMD?|SPANK|JIT_CKPT|PMIX?|OMPI|BASH_FUNC)_.*|JIT_CKPT|_|SHLVL|PWD|OLDPWD|TMPDIR|HOSTNAME|MASTER_ADDR|MASTER_PORT"
)
FEDERATED: Final = 1 << 26  # the least number of a federation's job: the bits above tell its first cluster
HASH: Final = 6  # hex digits: enough to see that a value is another one, too few to tell what it was


@dataclass(frozen=True)
class Fingerprint:
    """What an srun is known by: its words, its folder, its environment as name -> short hash, its cluster."""

    command: tuple[str, ...]
    folder: str
    environ: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""

    def to_entry(self) -> dict[str, Any]:
        """Return the fields of a journal's entry."""
        environ = dict(self.environ)
        return {"command": list(self.command), "folder": self.folder, "environ": environ, "cluster": self.cluster}


@dataclass(frozen=True)
class Training:
    """A training that this job has begun.

    Attributes:
        name: of its directory below the option's.
        known_by: None for one that an older version noted without it.
        restarts: the life of the job in which it was started last.
        ended: "done" when it ended well, "stop" when it failed for good, "" when it was interrupted.
        when: it ended well, in seconds since the epoch.
        lives: of the job, in which it was started.
        trained: the launch that ended well has trained.
        nodes: where its last launch ran.
        lost: nodes that stopped answering in that life.
    """

    name: str
    known_by: Fingerprint | None
    restarts: int
    ended: str
    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    when: float = 0.0
    lives: frozenset[int] = frozenset()
    trained: bool = False


def fingerprint(words: Sequence[str], folder: str, environ: Mapping[str, str]) -> Fingerprint:
    """Note what an srun is known by."""
    kept = {n: v for n, v in environ.items() if not PASSING.fullmatch(n)}
    hashed = {n: hashlib.sha256(os.fsencode(v)).hexdigest()[:HASH] for n, v in sorted(kept.items())}
    return Fingerprint(tuple(words), folder, hashed, environ.get("SLURM_CLUSTER_NAME", ""))


def find(root: str, job: str, cluster: str = "") -> list[Training]:
    """Read what this job has begun so far, in the order of the directories' numbers.

    Args:
        cluster: where the job runs; what another cluster's job of this number has begun only takes its name.
    """
    pattern = re.compile(re.escape(job) + r"(?:\.(\d{1,6}))?")
    try:
        matches = [m for n in os.listdir(root) if (m := pattern.fullmatch(n))]
    except OSError:
        return []
    found = []
    for match in sorted(matches, key=lambda m: int(m.group(1) or 1)):
        training = _read(match.group(), journal.read(os.path.join(root, match.group(), contract.JOURNAL)))
        if training is not None:
            found.append(_nobodys(training) if _is_anothers(training, job, cluster) else training)
    return found


def candidates(
    known: Sequence[Training], job: str, now: Fingerprint, restarts: int, passed: Collection[str] = ()
) -> Iterator[str]:
    """Name the directories that may belong to this srun, the likeliest first; the last ones are new.

    Args:
        passed: of those that ended well the ones that are passed over; the others are nobody's any more.
    """
    free = [t for t in known if t.restarts < restarts or _again(t, now)]
    free = [t for t in free if t.ended != "done" or t.name in passed]
    same = [t for t in free if _same(t, now)]
    if same:
        telling = _telling([t for t in known if _same(t, now)])
        fitting = [t for t in same if not telling & _differences(t, now)]
        fitting = [t for t in fitting if t.ended != "done" or not _differences(t, now)]
        # Stable: of equal ones, which a script can only have started one after the other, the first comes first.
        yield from (t.name for t in sorted(fitting, key=lambda t: len(_differences(t, now))))
    else:
        yield from _alike(free, now)
    taken = {t.name for t in known}
    number = 1
    while True:
        name = job if number == 1 else f"{job}.{number}"
        if name not in taken:
            yield name
        number += 1


def claim(
    known: Sequence[Training], job: str, now: Fingerprint, restarts: int, passed: Collection[str] = ()
) -> tuple[str, Hold]:
    """Return the name of this training's directory, and the hold on it that lasts until it is released."""
    for name in candidates(known, job, now, restarts, passed):
        if (held := hold.take(job, name)) is not None:
            return name, held
    raise AssertionError("there is no end of new names")


def over(known: Sequence[Training], restarts: int, forgotten: Callable[[float], bool]) -> frozenset[str]:
    """Name the directories of the trainings that are passed over in this life of the job; see Rule 4.

    Args:
        forgotten: says whether Slurm has lost that the job ended, which was after this time. Asked only in doubt.
    """
    last = max((life for t in known for life in (*t.lives, t.restarts) if life < restarts), default=-1)
    then = [t for t in known if t.restarts == last]
    done = [t for t in then if t.ended == "done" and t.trained and t.known_by is not None]
    # The unfinished one may have been taken up already, by an srun before or beside this one.
    unfinished = any(t.ended != "done" for t in then) or any(t.lives >= {last, restarts} for t in known)
    if not done or not (unfinished or forgotten(max(t.when for t in done))):
        return frozenset()
    return frozenset(t.name for t in done)


def leave_over(found: Journal, restarts: int) -> int:
    """Note and tell that a training which is over is not done once more; return its exit code."""
    why = f"this training ended well before the job came back; it is trained anew only without {found.directory}"
    found.append("decision", found.next_attempt() - 1, action="done", restarts=restarts, reason=why)
    say(f"done: {why}")
    return 0


def for_ranks(environ: dict[str, str], attempt: int, launcher: str, training: str) -> None:
    """Add what the ranks of a launch must know to srun's environment."""
    environ[contract.ENV_ATTEMPT] = str(attempt)
    environ[contract.ENV_LAUNCHER] = launcher
    environ[contract.ENV_TRAINING] = training
    if attempt:
        environ.setdefault("SLURM_OPEN_MODE", "append")  # srun --output: what was written before the failure stays


def _read(name: str, entries: Sequence[Mapping[str, Any]]) -> Training | None:
    known_by: Fingerprint | None = None
    nodes: tuple[str, ...] = ()
    restarts, ended, when, lives = -1, "", 0.0, set[int]()
    for entry in entries:
        if entry.get("entry") == "launch":
            known_by = _fingerprint_of(entry) or known_by
            restarts = entry["restarts"] if isinstance(entry.get("restarts"), int) else 0
            lives.add(restarts)
            ended, nodes = "", tuple(str(n) for n in entry.get("nodes") or ())
        elif entry.get("entry") == "outcome" and entry.get("code") == 0:
            ended = "done"  # also when nobody lived to decide it
            when = float(entry["time"]) if isinstance(entry.get("time"), (int, float)) else 0.0
        elif entry.get("entry") == "decision" and entry.get("action") in ("done", "stop"):
            ended = str(entry["action"])
            if isinstance(entry.get("restarts"), int):  # a later life has seen that it is over
                restarts, nodes = max(restarts, entry["restarts"]), ()
    if restarts < 0:
        return None
    launches = outcomes.read(entries)
    lost = tuple(dict.fromkeys(n for o in launches if o.restarts == restarts for n in o.unreachable))
    trained = any(o.trained and o.code == 0 for o in launches)
    return Training(name, known_by, restarts, ended, nodes, lost, when, frozenset(lives), trained)


def _is_anothers(training: Training, job: str, cluster: str) -> bool:
    then = training.known_by.cluster if training.known_by else ""
    return bool(then and cluster) and then != cluster and int(job.partition("_")[0]) < FEDERATED


def _nobodys(training: Training) -> Training:
    return Training(training.name, None, sys.maxsize, "done")


def _fingerprint_of(entry: Mapping[str, Any]) -> Fingerprint | None:
    command, environ = entry.get("command"), entry.get("environ")
    if not isinstance(command, list) or not isinstance(environ, dict):
        return None
    hashed = {str(k): str(v) for k, v in environ.items()}
    return Fingerprint(tuple(map(str, command)), str(entry.get("folder")), hashed, str(entry.get("cluster") or ""))


def _again(training: Training, now: Fingerprint) -> bool:
    """Whether a script tries once more what failed in this life."""
    return training.ended != "done" and _same(training, now) and not _differences(training, now)


def _same(training: Training, now: Fingerprint) -> bool:
    known = training.known_by
    return known is None or (known.command, known.folder) == (now.command, now.folder)


def _differences(training: Training, now: Fingerprint) -> set[str]:
    """Name the variables that are not as they were."""
    then = training.known_by.environ if training.known_by else now.environ
    return {name for name in then.keys() | now.environ.keys() if then.get(name) != now.environ.get(name)}


def _telling(same: Sequence[Training]) -> set[str]:
    """Name the variables in which trainings of one command differed within one life of the job: SEED, say."""
    found: set[str] = set()
    for a, b in itertools.combinations(same, 2):
        if a.restarts == b.restarts and b.known_by is not None:
            found |= _differences(a, b.known_by)
    return found


def _alike(free: Sequence[Training], now: Fingerprint) -> Iterator[str]:
    """Name the training whose words are most like these, if it is one, more than half of them equal, and unfinished."""
    words = Counter(" ".join(now.command).split())
    rated = []
    for training in free:
        then = Counter(" ".join(training.known_by.command if training.known_by else ()).split())
        equal = sum((words & then).values())
        if 2 * equal > max(words.total(), then.total()):
            rated.append((equal, training))
    rated.sort(key=lambda row: -row[0])
    if rated and not rated[0][1].ended and (len(rated) == 1 or rated[0][0] > rated[1][0]):
        yield rated[0][1].name
