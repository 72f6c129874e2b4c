"""Turn the first word of a command line into the module that answers it; the entry point of `jit-ckpt`.

Rule: a command's module is imported when the command is given: the cluster's own python3, which `doctor` must work
      with, has no h5py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Final, NamedTuple

USAGE = 2  # exit code for wrong usage


class Command(NamedTuple):
    """What `jit-ckpt --help` says of a command, and who answers it; `main` is given all words, the first one too."""

    help: str
    main: Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the entry point of `jit-ckpt`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths hold any bytes, and terminals lack characters
    if words[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not words or words[0] not in COMMANDS:
        asked = f"jit-ckpt: no command {words[0]!r}\n" if words else ""
        print(f"{asked}{_usage()}", file=sys.stderr)
        return USAGE
    return COMMANDS[words[0]].main(words)


def _browse(words: Sequence[str]) -> int:
    try:
        from jitmpi import browse
    except ModuleNotFoundError as error:
        if error.name not in ("h5py", "numpy"):
            raise
        where = f"{sys.executable} lacks it: use the jit-ckpt of the environment that trains, or install it there"
        print(f"jit-ckpt: {words[0]} needs {error.name}, and {where}", file=sys.stderr)
        return USAGE
    return browse.main(words)


def _config(words: Sequence[str]) -> int:
    from slurm_plugin import effective

    return effective.main(words)


def _doctor(words: Sequence[str]) -> int:
    from slurm_plugin import doctor

    return doctor.main(words)


COMMANDS: Final = {
    "config": Command("show what a job submitted here gets, and who says so", _config),
    "doctor": Command("check this cluster, and say what to change and why", _doctor),
    "ls": Command("list checkpoints, newest first", _browse),
    "show": Command("say what a checkpoint holds and from which failure it came", _browse),
    "verify": Command("read a checkpoint and compare every checksum", _browse),
}


def _usage() -> str:
    lines = [f"  {name:<8} {command.help}" for name, command in COMMANDS.items()]
    begin = "usage: jit-ckpt COMMAND ...\n\nJust-in-time checkpoints under Slurm.\n\n"
    return begin + "\n".join([*lines, "", "`jit-ckpt COMMAND --help` tells more."])


if __name__ == "__main__":
    sys.exit(main())
