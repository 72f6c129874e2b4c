"""Let some of a job's nodes watch the node of its batch script, for as long as no step of the job runs elsewhere.

    Prolog: its environment -> <spool>/<job id>/guard, which the epilog removes with the job's folder
    HealthCheckProgram: these notes -> `orphan` for each job whose batch node is silent, or was: it may have booted

Rule 1: root decides nothing here, and a job's words are only handed on: `orphan` runs as the job's owner and asks Slurm
        whether that too has lost the node.
Rule 2: the prolog asks nobody, and nobody waits for the look: it goes on in a process of its own, for a minute at most.
Rule 3: without a note (a full spool, words that are no option) the job runs all the same, and the node is as good.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurm_plugin import contract, kernel_log
from slurm_plugin.child import Child
from slurm_plugin.slurm_text import NODE_NAME, SLURMD_PORT, SlurmError, expand
from slurm_plugin.spool import Spool, SpoolError

FILE: Final = "{job}/guard"  # in the spool
SILENT: Final = "silent"  # in the spool: the jobs whose batch node was silent once, "job restarts" a line
GUARDS: Final = 8  # nodes that watch one job
MOST: Final = 64  # jobs of this node that one look starts `orphan` for; the others come with the next look
LONGEST: Final = 16 << 10  # bytes of a note; the option has 8.5 KiB at most
PATIENCE: Final = 60  # seconds for a look; it takes one, unless names cannot be resolved
AT_ONCE: Final = 32  # nodes that are tried at the same time
SETPRIV: Final = "/usr/bin/setpriv"
# What packaging/wrapper writes, with the interpreter and the code that run here.
RUN: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurm_plugin.orphan import main; sys.exit(main())"
CODE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NUMBER: Final = re.compile(r"\d{1,10}", re.ASCII)
_PATH: Final = re.compile(r"/[^\n]*")


@dataclass(frozen=True)
class Note:
    """A job, as the prolog saw it.

    Attributes:
        job: its bare number, also for a task of an array.
        uid, gid, restarts: its owner and its life, numbers as text.
        batch: the node of its script.
        conf: where slurm.conf is, "" for Slurm's own place.
        options: the option's text, the job's word.
    """

    job: str
    uid: str
    gid: str
    restarts: str
    batch: str
    conf: str
    options: str


def guards(nodes: Sequence[str], count: int = GUARDS) -> tuple[str, ...]:
    """Choose who watches the first node: some of the others, spread, as neighbours often fail together."""
    others = nodes[1:]
    return tuple(others[i * len(others) // count] for i in range(count)) if len(others) > count else tuple(others)


def note_of(environ: Mapping[str, str], node: str) -> Note | None:
    """Turn a prolog's environment into its note; None where this node is not to watch, or a word is none of Slurm's."""

    def get(name: str) -> str:
        return environ.get(name, "")

    options = get(contract.ENV_OPTIONS_HOOK)
    try:
        contract.parse_options(options)
        nodes = expand(get("SLURM_JOB_NODELIST") or get("SLURM_NODELIST"))  # 22.05 has the second one only
    except (contract.OptionError, SlurmError):
        return None
    if node not in guards(nodes):
        return None
    job, uid, gid, restarts = (get(f"SLURM_JOB_{name}") for name in ("ID", "UID", "GID", "RESTART_COUNT"))
    note = Note(job, uid, gid, restarts, nodes[0], get("SLURM_CONF"), options)
    return note if _is_sound(note) else None


def write(note: Note, boot: str) -> bytes:
    """Write a note, one word a line; the job's own comes last."""
    words = (boot, note.uid, note.gid, note.restarts, note.batch, note.conf, note.options)
    return os.fsencode("\n".join(words))


def read(text: bytes, job: str, boot: str) -> Note | None:
    """Read what `write` wrote for this job in this boot; None for anything else."""
    words = os.fsdecode(text).split("\n", 6)
    if len(text) > LONGEST or len(words) != 7 or words[0] != boot:
        return None
    note = Note(job, *words[1:])
    return note if _is_sound(note) else None


def command(note: Note) -> tuple[list[str], dict[str, str]]:
    """Return the line and the environment with which `orphan` runs as the job's owner; no shell reads them."""
    owner = [f"--reuid={note.uid}", f"--regid={note.gid}", "--clear-groups"]
    orphan = [sys.executable, "-I", "-B", "-c", RUN, CODE]
    words = [note.job, note.restarts, note.batch, note.batch, note.options, "idle"]
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"} | ({"SLURM_CONF": note.conf} if note.conf else {})
    return [SETPRIV, *owner, "--", *orphan, *words], environ


def leave_note(spool: Spool, environ: Mapping[str, str], node: str) -> None:
    """Note in the spool that this node watches the job, if it is to.

    Raises:
        SpoolError: it cannot be written.
        OSError: the boot has no id.
    """
    note = note_of(environ, node)
    text = write(note, kernel_log.boot_id()) if note else b""
    if note and len(text) <= LONGEST:
        spool.write(FILE.format(job=note.job), text)


def look(
    spool: Spool, start: Callable[[Note], object] | None = None, responds: Callable[[str, int], bool] | None = None
) -> Child | None:
    """Begin to look after the jobs of this node's notes; None if there are none.

    Raises:
        OSError: the spool cannot be listed, or no process be started.
    """
    boot, notes = kernel_log.boot_id(), []
    for job in filter(_NUMBER.fullmatch, spool.names()):
        try:
            notes.append(read(spool.read(FILE.format(job=job)), job, boot))
        except SpoolError:
            continue  # not ours
    found = [note for note in notes if note]
    if not found:
        return None
    return Child.fork(lambda: _look_after(spool, found, start or _start, responds), keep=(spool.fileno(),))


def in_need(notes: Sequence[Note], answering: Collection[str], before: bytes) -> tuple[list[Note], bytes]:
    """Return the notes whose batch node is silent or was so `before`, and what to remember of them.

    A node that boots again answers, but the script that ran there does not.
    """
    known = set(before.decode("ascii", "replace").splitlines())
    found = [n for n in notes if n.batch not in answering or f"{n.job} {n.restarts}" in known]
    return found, "".join(f"{note.job} {note.restarts}\n" for note in found).encode()


def _look_after(
    spool: Spool,
    notes: Sequence[Note],
    start: Callable[[Note], object],
    responds: Callable[[str, int], bool] | None,
) -> None:
    from concurrent.futures import ThreadPoolExecutor  # here: prologs need none of this

    from slurm_plugin import notice

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    ask, nodes = responds or notice.responds, sorted({note.batch for note in notes})
    with ThreadPoolExecutor(AT_ONCE) as pool:
        heard = zip(nodes, pool.map(lambda node: ask(node, SLURMD_PORT), nodes), strict=True)
        answering = {node for node, alive in heard if alive}
    before = b""
    with contextlib.suppress(SpoolError):
        before = spool.read(SILENT)
    found, known = in_need(notes, answering, before)
    if known != before:
        with contextlib.suppress(SpoolError):  # it is full: then a silent node counts while it is silent
            spool.write(SILENT, known)
    for note in found[:MOST]:
        start(note)


def _start(note: Note) -> None:
    line, environ = command(note)
    Child.fork(lambda: os.execve(line[0], line, environ))


def _is_sound(note: Note) -> bool:
    numbers = (note.job, note.uid, note.gid, note.restarts)
    return (
        all(map(_NUMBER.fullmatch, numbers))
        and bool(NODE_NAME.fullmatch(note.batch))
        and (not note.conf or bool(_PATH.fullmatch(note.conf)))
    )
