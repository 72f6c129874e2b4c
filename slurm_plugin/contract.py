"""Names that C, shell and Python share.

Rule 1: `spank/contract.h` holds the same values; tests/unit/test_contract.py compares the two.
Rule 2: data only; whoever reads an option's value calls `parse_options`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Final

OPTION: Final = "jit-ckpt"
OFF: Final = "off"  # its value that takes it back

# Set by the SPANK plugin for the whole job (spank_job_control_setenv); Slurm shows it under these three names.
ENV_OPTIONS: Final = "JIT_CKPT"  # in every task, set by the plugin itself
ENV_OPTIONS_JOB: Final = "SLURM_SPANK_JIT_CKPT"  # in the job's own environment
ENV_OPTIONS_HOOK: Final = "SPANK_JIT_CKPT"  # in Prolog, Epilog, PrologSlurmctld, EpilogSlurmctld

# Set beside it (as SLURM_SPANK_JIT_CKPT_UNASKED in the job) when the site's `enable` gave the option and nobody asked:
# such a job may know nothing of jitmpi.
ENV_UNASKED: Final = "JIT_CKPT_UNASKED"
# The user's own layer between the site's defaults and the command line of sbatch, salloc and srun: "off", or values.
ENV_WISHES: Final = "SBATCH_JIT_CKPT"

# Set by packaging/job_submit.lua for the batch script: the tasks that the user asked for, without the spare nodes'.
ENV_TASKS: Final = "JIT_CKPT_TASKS"

# Set by jit-srun for the ranks of one launch.
ENV_ATTEMPT: Final = "JIT_CKPT_ATTEMPT"  # number of this launch in the job's life, from 0
ENV_LAUNCHER: Final = "JIT_CKPT_LAUNCHER"  # "host:port:key", where notices to jit-srun go
ENV_TRAINING: Final = "JIT_CKPT_TRAINING"  # name of its directory below `dir`: "<job id>", "<job id>.2", ...

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
EXIT_NODE_BAD: Final = 86  # a hook found its node bad; any other failure of a hook is ours (see packaging/wrapper)

MANIFEST: Final = "manifest.json"
CHECKPOINT: Final = "checkpoint.h5"
RANK_FILE: Final = "rank{rank}.h5"
CHECKPOINT_DIR: Final = "m{minibatch}-r{attempt}"
CLAIM: Final = "claim-r{attempt}.json"
JOURNAL: Final = "journal.jsonl"  # in the job's directory; jit-srun appends one line per launch, outcome and decision

SPOOL: Final = "/var/spool/jit-ckpt"  # root's, mode 0700; one folder a job, one line a finished task
TASKS: Final = "tasks"  # that file, in SPOOL/<job id>/

SITE: Final = "/etc/jit-ckpt.conf"  # the administrator's file: `key = value` lines, see slurm_plugin/site.py
SHIM_DIR: Final = "/usr/lib/jit-ckpt/bin"  # holds a program `srun`; first in the PATH of batch scripts with the option


class OptionError(ValueError):
    """A `--jit-ckpt` value that cannot be used; the message names the key and what is allowed."""


@dataclass(frozen=True)
class Options:
    """The values of `--jit-ckpt=key=value,...`.

    Attributes:
        dir: where checkpoints go, an absolute path on a file system that every node sees; may hold %j (see `in_job`).
        keep: committed checkpoints to keep, the newest first.
        requeues: how often the job may go back to the queue.
        relaunches: how often the step may be started again inside one allocation.
        relaunch: "on" or "off"; off means that every failure goes through the queue.
        hang: a rank hangs when it takes this many times its own median minibatch; 0 means never ("off").
        hang_floor: seconds below which nothing is called a hang.
        settle: seconds a healthy rank may take to end a running update.
        save: seconds the survivors may take to write the state.
        spares: nodes of the allocation that are kept aside, for the place of those that fail.
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
    spares: int = 0
    resume: str = ""


# key -> (what is allowed, least, most); None for keys that are not numbers.
ALLOWED: Final[dict[str, tuple[str, float | None, float | None]]] = {
    "dir": ("an absolute or relative path without commas; %u is the user, %j the job id", None, None),
    "keep": ("a whole number from 1 to 1000", 1, 1000),
    "requeues": ("a whole number from 0 to 1000", 0, 1000),
    "relaunches": ("a whole number from 0 to 1000", 0, 1000),
    "relaunch": ("on or off", None, None),
    "hang": ("off or a number from 2 to 1000", 2, 1000),
    "hang-floor": ("seconds from 1 to 86400", 1, 86400),
    "settle": ("seconds from 1 to 3600", 1, 3600),
    "save": ("seconds from 1 to 86400", 1, 86400),
    "spares": ("a whole number from 0 to 1000", 0, 1000),
    "resume": ("the path of a committed checkpoint, without commas", None, None),
}
WHOLE: Final = frozenset({"keep", "requeues", "relaunches", "spares"})

# Keys of the site's file beside those of the option: key -> (what is allowed, kind, least, most); bounds of numbers.
# Of the option's keys only `resume` cannot be a site's default.
SITE_ALLOWED: Final[dict[str, tuple[str, str, int, int]]] = {
    "enable": ("on, off, or names of partitions with commas between them", "NAMES", 0, 0),
    "default-partition": ("the name of a partition", "NAME", 0, 0),
    "max-keep": ("a whole number from 1 to 1000", "WHOLE", 1, 1000),
    "max-requeues": ("a whole number from 0 to 1000", "WHOLE", 0, 1000),
    "max-spares": ("a whole number from 0 to 1000", "WHOLE", 0, 1000),
    "adds-spares": ("on or off", "SWITCH", 0, 0),
    "shim": ("on or off", "SWITCH", 0, 0),
    "expedite": ("on or off", "SWITCH", 0, 0),
    "python": ("an absolute path", "ABSOLUTE", 0, 0),
    "checks": ("on, off, or names of checks with commas between them", "NAMES", 0, 0),
    "mounts": ("absolute paths with commas between them", "PATHS", 0, 0),
    "check-patience": ("seconds from 1 to 60", "NUMBER", 1, 60),
    "checks-dir": ("an absolute path", "ABSOLUTE", 0, 0),
    "drain": ("on or off", "SWITCH", 0, 0),
    "suspect-threshold": ("a whole number from 0 to 1000", "WHOLE", 0, 1000),
    "suspect-half-life": ("hours from 1 to 10000", "NUMBER", 1, 10000),
    "spool-free": ("MiB, a whole number from 0 to 1000000", "WHOLE", 0, 1000000),
}

# The option's keys that a site can limit -> the key of the limit.
LIMITS: Final = {"keep": "max-keep", "requeues": "max-requeues", "spares": "max-spares"}

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
        values[key.replace("-", "_")] = parse_value(key, value)
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


def in_job(options: Options, job: str) -> Options:
    """Return the options as they count inside a job: %j in `dir` is its id, "100_7" for a task of an array."""
    return replace(options, dir=options.dir.replace("%j", job))


def parse_value(key: str, text: str) -> object:
    """Read the value of one key of the option.

    Raises:
        OptionError: it is not allowed.
    """
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
