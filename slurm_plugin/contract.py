"""Names that C, shell and Python share.

Rule 1: `spank/contract.h` holds the same values; tests/unit/test_contract.py compares the two.
Rule 2: data only; whoever reads an option's value calls `parse_options`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

OPTION: Final = "jit-ckpt"

# Set by the SPANK plugin for the whole job (spank_job_control_setenv); Slurm shows it under these three names.
ENV_OPTIONS: Final = "JIT_CKPT"  # in every task, set by the plugin itself
ENV_OPTIONS_JOB: Final = "SLURM_SPANK_JIT_CKPT"  # in the job's own environment
ENV_OPTIONS_HOOK: Final = "SPANK_JIT_CKPT"  # in Prolog, Epilog, PrologSlurmctld, EpilogSlurmctld

# Set by jit-srun for the ranks of one launch.
ENV_ATTEMPT: Final = "JIT_CKPT_ATTEMPT"  # number of this launch in the job's life, from 0
ENV_LAUNCHER: Final = "JIT_CKPT_LAUNCHER"  # "host:port:key", where notices to jit-srun go

# Environment of ranks that use NCCL, unless the user has set it: name -> (value, why). The process has to outlive the
# death of a peer, and must not go on with half-reduced gradients.
NCCL: Final[dict[str, tuple[str, str]]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "3 (default) ends the process; 2 aborts the hung collective, after which the update already queued behind "
        "it would run on garbage; with 0 the stream stays where it is, and the parameters with it",
    ),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "the heartbeat monitor ends the process when the watchdog is stuck"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "the watchdog would end the process with a CUDA error in its thread"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": ("86400", "for versions that start the monitor regardless"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "a timeout must not start a dump over all ranks while the survivors save"),
}

EXIT_COMMITTED: Final = 83  # the rank left after the state of the job was committed
EXIT_LOST: Final = 84  # the rank left after a fault and nothing could be saved
EXIT_REFUSED: Final = 85  # bad input at the start; running again would end the same way

MANIFEST: Final = "manifest.json"
CHECKPOINT: Final = "checkpoint.h5"
RANK_FILE: Final = "rank{rank}.h5"
CHECKPOINT_DIR: Final = "m{minibatch}-r{attempt}"
CLAIM: Final = "claim-r{attempt}.json"
JOURNAL: Final = "journal.jsonl"  # in the job's directory; jit-srun appends one line per launch, outcome and decision

SPOOL: Final = "/var/spool/jit-ckpt"  # root's, mode 0700; one folder a job, one line a finished task
TASKS: Final = "tasks"  # that file, in SPOOL/<job id>/


class OptionError(ValueError):
    """A `--jit-ckpt` value that cannot be used; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Options:
    """The values of `--jit-ckpt=key=value,...`.

    Attributes:
        dir: where checkpoints go, an absolute path on a file system that every node sees.
        keep: committed checkpoints to keep, the newest first.
        requeues: how often the job may go back to the queue.
        relaunches: how often the step may be started again inside one allocation.
        relaunch: "on" or "off"; off means that every failure goes through the queue.
        hang: a rank hangs when it takes this many times its own median minibatch; 0 means never ("off").
        hang_floor: seconds below which nothing is called a hang.
        settle: seconds a healthy rank may take to end a running update.
        save: seconds the survivors may take to write the state.
        resume: a committed checkpoint of an earlier job to start from ("" for none).
    """

    dir: str
    keep: int = 2
    requeues: int = 10
    relaunches: int = 10
    relaunch: str = "on"
    hang: float = 10.0
    hang_floor: float = 300.0
    settle: float = 30.0
    save: float = 1800.0
    resume: str = ""


# key -> (what is allowed, least, most); None for keys that are not numbers.
ALLOWED: Final[dict[str, tuple[str, float | None, float | None]]] = {
    "dir": ("an absolute or relative path without commas", None, None),
    "keep": ("a whole number from 1 to 1000", 1, 1000),
    "requeues": ("a whole number from 0 to 1000", 0, 1000),
    "relaunches": ("a whole number from 0 to 1000", 0, 1000),
    "relaunch": ("on or off", None, None),
    "hang": ("off or a number from 2 to 1000", 2, 1000),
    "hang-floor": ("seconds from 1 to 86400", 1, 86400),
    "settle": ("seconds from 1 to 3600", 1, 3600),
    "save": ("seconds from 1 to 86400", 1, 86400),
    "resume": ("the path of a committed checkpoint, without commas", None, None),
}
WHOLE: Final = frozenset({"keep", "requeues", "relaunches"})

# One grammar for C and Python: int() and float() also take "1_0", " 5", "1e3" and other scripts' digits.
_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def parse_options(text: str) -> Options:
    """Read `key=value,...` as the SPANK plugin passes it on.

    Raises:
        OptionError: unknown key, missing or bad value; names the key and the allowed values.
    """
    values: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in ALLOWED:
            raise OptionError(f"unknown key {key!r}; allowed keys: {', '.join(ALLOWED)}")
        if not equals or not value:
            raise OptionError(f"key {key!r} needs a value: {ALLOWED[key][0]}")
        values[key.replace("-", "_")] = _value(key, value)
    if "dir" not in values:
        raise OptionError(f"key 'dir' is missing: {ALLOWED['dir'][0]}")
    return Options(**values)  # type: ignore[arg-type]


def format_options(options: Options) -> str:
    """Write options so that `parse_options` reads the same values back."""
    items = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value == "" or (field.name == "hang" and value == 0):
            value = "off" if field.name == "hang" else value
        if value != "":
            written = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
            items.append(f"{field.name.replace('_', '-')}={written}")
    return ",".join(items)


def _value(key: str, text: str) -> object:
    allowed, least, most = ALLOWED[key]
    if key == "relaunch":
        if text not in ("on", "off"):
            raise OptionError(f"key {key!r} is {text!r}; allowed: {allowed}")
        return text
    if least is None or most is None:
        if _CONTROL.search(text):
            raise OptionError(f"key {key!r} is {text!r}; allowed: {allowed}")
        return text
    if key == "hang" and text == "off":
        return 0.0
    if not _NUMBER.fullmatch(text) or (key in WHOLE and "." in text):
        raise OptionError(f"key {key!r} is {text!r}; allowed: {allowed}")
    number: float = int(text) if key in WHOLE else float(text)
    if not least <= number <= most:
        raise OptionError(f"key {key!r} is {text!r}; allowed: {allowed}")
    return number
