"""Turn jit-srun's command line into what the step needs and what srun gets: argv -> Request, Request + nodes -> argv.

Rule 1: jit-srun understands only what decides nodes and tasks; everything else reaches srun as it was written.
Rule 2: jit-srun's own options come first, so that no unknown option of a newer srun can swallow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from slurm_plugin.slurm_text import SlurmError, expand

# From srun(1), Slurm 22.05 to 26.05, and pyxis: long options that never take the next word as their value ...
FLAGS: Final = (
    " async bcast compress consolidate-segments contiguous debugger-test disable-status exact exclusive external"
    " get-user-env help hold immediate interactive jit-ckpt join kill-on-bad-exit label multi-prog nice no-allocate"
    " no-kill no-rotate oom-kill-step overcommit overlap oversubscribe parallel parsable preserve-env propagate pty"
    " quiet quit-on-interrupt reboot resv-ports send-libs share spread-job spread-segments stepmgr test-only"
    " unbuffered usage use-min-nodes verbose version wait-for-children whole x11"
    " container-entrypoint container-entrypoint-log container-mount-home container-readonly container-remap-root"
    " container-writable no-container-entrypoint no-container-mount-home no-container-remap-root "
)
# ... and short ones that do.
VALUED: Final = frozenset("ABbCcDdeFGiJLMmNnopPqrStTUWwx")
ATTACHED: Final = frozenset("IKk")  # their value, if any, is the rest of the word

# Options of sruns that start no ranks of a training, or start them where jit-srun cannot follow.
ALONE: Final = frozenset(
    ["pty", "x11", "help", "h", "usage", "version", "V", "test-only", "no-allocate", "Z", "het-group", "async"]
)
COUNTING: Final = frozenset(["cpus-per-task", "c", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"])
OURS: Final = ("--overlap", "--no-kill", "-K0", "-W0")


class ArgumentError(ValueError):
    """jit-srun cannot tell from its arguments how many nodes the step needs."""


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        nodes: how many nodes the step needs; 0 for all of the job.
        tasks: how many ranks, 0 to leave it to srun.
        within, without: nodes that it may or must not use; empty for no wish.
        export: the value of --export, "" for none.
        rest: srun's other options, the program and its arguments.
        spoken: the whole line as it was written, without --export.
    """

    nodes: int
    tasks: int
    within: tuple[str, ...]
    without: tuple[str, ...]
    export: str
    rest: tuple[str, ...]
    spoken: tuple[str, ...] = ()


def parse(argv: Sequence[str], environ: Mapping[str, str], spares: int = 0) -> Request:
    """Read the command line of jit-srun; the environment gives what sbatch was told.

    Args:
        spares: how many of the job's nodes are kept aside where the line does not say how many the ranks need.

    Raises:
        ArgumentError: no program, node counts and lists that are not fixed, or no node beside the spare ones.
    """
    options, program = _split(argv)
    if not program:
        raise ArgumentError("no program to start; see jit-srun --help")
    found: dict[str, str] = {}
    rest: list[str] = []
    spoken = [word for name, _, words in options if name != "export" for word in words]
    spoken += ["--"] if program[0].startswith("-") else []
    for name, value, words in options:
        long = {"N": "nodes", "n": "ntasks", "w": "nodelist", "x": "exclude"}.get(name, name)
        found[long] = value
        if long not in ("nodes", "ntasks", "nodelist", "exclude", "export"):
            rest += words
        elif len(words[0]) > 2 and words[0][1] != "-" and words[0][1] != name:
            rest.append(words[0][: words[0].index(name)])  # the flags before it in one word: -lN4
    nodes, tasks = _counts(found, environ)
    if spares and not nodes:
        nodes, tasks = _counts({**found, "nodes": _beside(spares, environ)}, environ)
    export = found.get("export", environ.get("SLURM_EXPORT_ENV", ""))
    within, without = _list(found, "nodelist"), _list(found, "exclude")
    return Request(nodes, tasks, within, without, export, (*rest, *program), (*spoken, *program))


def command(request: Request, nodes: Sequence[str], variables: Sequence[str], srun: str = "srun") -> list[str]:
    """Return the srun command for these nodes; `variables` must reach the ranks whatever --export says."""
    line = [srun, *OURS, "-N", str(len(nodes)), "-w", ",".join(nodes)]
    if request.tasks:
        line += ["-n", str(request.tasks)]
    return [*line, *_export(request, variables), *request.rest]


def as_spoken(
    request: Request, size: bool, lost: Sequence[str], variables: Sequence[str], srun: str = "srun"
) -> list[str]:
    """Return the srun command that leaves all choices to Slurm, as the user wrote it.

    Args:
        size: the step's size is that of the request, because nodes are kept aside or lost.
        lost: nodes that do not answer any more, although Slurm may not know it yet; the steps that were there hold
            their nodes, hence --overlap.
    """
    line = [srun]
    if lost:
        line += ["--overlap", *([] if request.without else ["-x", ",".join(lost)])]
    if size:
        line += ["-N", str(request.nodes), *(["-n", str(request.tasks)] if request.tasks else [])]
    return [*line, *_export(request, variables), *request.spoken]


def foreign(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Say why an srun of a script is none that could be started again, "" if it is one."""
    options, program = _split(argv)
    found = {name: value for name, value, _ in options}
    if alone := sorted(ALONE & set(found)):
        return f"--{alone[0]}"
    if found.get("jobid", found.get("j", environ.get("SLURM_JOB_ID"))) != environ.get("SLURM_JOB_ID"):
        return "it belongs to another job"
    if ":" in program or environ.get("SLURM_HET_SIZE"):
        return "a heterogeneous step"
    return ""


def _export(request: Request, variables: Sequence[str]) -> list[str]:
    if not request.export:
        return []
    kept = [] if request.export in ("NONE", "NIL") else [request.export]
    return ["--export=" + ",".join([*kept, *variables])]


def _counts(found: Mapping[str, str], environ: Mapping[str, str]) -> tuple[int, int]:
    nodes, tasks = _nodes(found.get("nodes")), _count("ntasks", found.get("ntasks"))
    a_node = _count("ntasks-per-node", found.get("ntasks-per-node"))
    if tasks:
        return (nodes or (-(-tasks // a_node) if a_node else 0)), tasks
    if not nodes:
        return 0, 0  # all nodes, and srun counts the tasks as always
    if not a_node and not COUNTING & set(found):
        a_node = _digits(environ.get("SLURM_NTASKS_PER_NODE")) or _average(environ) or 1
    return nodes, nodes * a_node


def _beside(spares: int, environ: Mapping[str, str]) -> str:
    try:
        held = len(expand(environ.get("SLURM_JOB_NODELIST", "")))
    except SlurmError:
        held = 0
    if spares >= held:
        raise ArgumentError(f"spares={spares}: the job has {held} nodes, and the ranks need one: ask for more with -N")
    return str(held - spares)


def _average(environ: Mapping[str, str]) -> int:
    """Tasks a node of the whole job, where they divide evenly."""
    tasks, nodes = _digits(environ.get("SLURM_NTASKS")), _digits(environ.get("SLURM_JOB_NUM_NODES"))
    return tasks // nodes if nodes and tasks % nodes == 0 else 0


def _nodes(text: str | None) -> int:
    low, dash, high = (text or "").partition("-")
    if dash and low != high:
        raise ArgumentError(f"--nodes={text}: the ranks need a fixed number of nodes")
    return _count("nodes", low) if text else 0


def _count(name: str, text: str | None) -> int:
    if text is None:
        return 0
    if not _digits(text):
        raise ArgumentError(f"--{name}={text}: a whole number is needed")
    return int(text)


def _digits(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def _list(found: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = found.get(name, "")
    try:
        return expand(text)
    except SlurmError:
        raise ArgumentError(f"--{name}={text}: names of nodes are needed, such as n[1-4]") from None


def _split(argv: Sequence[str]) -> tuple[list[tuple[str, str, list[str]]], list[str]]:
    """Split srun's options, each as (name, value, words), from the program and its arguments."""
    options: list[tuple[str, str, list[str]]] = []
    words = list(argv)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        name, value, alone = _option(words[0])
        taken = [words.pop(0)]
        if not alone:
            if not words:
                raise ArgumentError(f"{taken[0]} needs a value")
            value = words.pop(0)
            taken.append(value)
        options.append((name, value, taken))
    return options, words[1:] if words[:1] == ["--"] else words


def _option(word: str) -> tuple[str, str, bool]:
    """Read one word: the option's name, its value, and whether the next word is not part of it."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name, value, bool(equals) or f" {name} " in FLAGS
    for position, letter in enumerate(word[1:], 1):
        if letter in VALUED:
            value = word[position + 1 :]
            return letter, value, bool(value)
        if letter in ATTACHED:
            break
    return word[1:], "", True
