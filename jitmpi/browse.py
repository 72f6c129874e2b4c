"""Turn command lines into answers about checkpoints: `jit-ckpt show`, `verify` and `ls`.

Rule 1: only looks; nothing is written, finished or removed.
Rule 2: exit codes for scripts: 0 good, 1 damaged, 2 usage or no such checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from jitmpi import describe, files, manifests, restore, tidy
from jitmpi.errors import DamagedError
from jitmpi.events import Manifest
from slurm_plugin import contract

GOOD, DAMAGED, NONE = 0, 1, 2
REDRAW = 0.2  # seconds between two drawings of the progress line

WHERE = "a checkpoint's folder, or the folder of a job (its newest checkpoint is taken)"


def main(arguments: Sequence[str]) -> int:
    """Run `ls`, `show` or `verify`; the command is the first word."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except FileNotFoundError as error:
        print(f"jit-ckpt: {error}", file=sys.stderr)
        return NONE
    except DamagedError as error:
        print(f"jit-ckpt: damaged: {describe.plain(str(error))}", file=sys.stderr)
        return DAMAGED
    except BrokenPipeError:  # `| head`: what was asked for has been shown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD


def _parser() -> argparse.ArgumentParser:
    codes = "Exit codes: 0 good, 1 damaged, 2 wrong usage or no such checkpoint."
    parser = argparse.ArgumentParser(prog="jit-ckpt", description="Look at just-in-time checkpoints.", epilog=codes)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="say what a checkpoint holds and from which failure it came", epilog=codes)
    show.add_argument("directory", metavar="DIR", help=WHERE)
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.set_defaults(run=_show)
    verify = commands.add_parser("verify", help="read a checkpoint and compare every checksum", epilog=codes)
    verify.add_argument("directory", metavar="DIR", help=WHERE)
    verify.set_defaults(run=_verify)
    ls = commands.add_parser("ls", help="list checkpoints, newest first", epilog=codes)
    ls.add_argument("directory", metavar="DIR", nargs="?", default=".", help="a job's folder, or one of several jobs")
    ls.set_defaults(run=_ls)
    for command in (show, verify, ls):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _show(options: argparse.Namespace) -> int:
    manifest = manifests.read(_resolve(options.directory))
    if options.json:
        raw = manifest.to_dict()
        if not options.tensors:
            raw["tensors"], raw["files"] = len(manifest.tensors), [file.file for file in manifest.files]
        raw |= {"story": describe.story(manifest), "unique_bytes": describe.unique_bytes(manifest)}
        raw |= {"bytes": describe.disk_bytes(manifest), "dtypes": describe.dtypes(manifest.tensors)}
        _print_json(raw)
        return GOOD
    print("\n".join(describe.summary(manifest)))
    if options.tensors:
        print("\n".join(describe.tensor_line(tensor) for tensor in manifest.tensors))
    return GOOD


def _verify(options: argparse.Namespace) -> int:
    path = _resolve(options.directory)
    progress = _Progress(sys.stderr, _expected(path))
    problems = restore.verify(path, progress.more)
    progress.end()
    if options.json:
        _print_json({"path": path, "good": not problems, "problems": [asdict(problem) for problem in problems]})
    elif not problems:
        print(f"{path}: good, {describe.size(progress.done)} read")
    else:
        print(f"{path}: damaged")
        for problem in problems:
            dataset = f": dataset {problem.dataset}" if problem.dataset else ""
            print(describe.plain(f"  {problem.file}{dataset}: {problem.what}"))
    return DAMAGED if problems else GOOD


def _ls(options: argparse.Namespace) -> int:
    rows = [_row(found) for job in _jobs(options.directory) for found in tidy.committed(job)]
    if options.json:
        _print_json(rows)
    elif not rows:
        print(f"no checkpoints in {options.directory}")
    else:
        table = [["JOB", "CHECKPOINT", "MINIBATCH", "SIZE", "AGE", "CAUSE"], *(_cells(row) for row in rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return DAMAGED if any(row["damage"] for row in rows) else GOOD


def _row(found: tidy.Committed) -> dict[str, Any]:
    row: dict[str, Any] = {"path": found.path, "minibatch": found.minibatch, "attempt": found.attempt, "damage": ""}
    try:
        manifest = manifests.read(found.path)
    except DamagedError as error:
        return row | {"damage": str(error)}
    damage = next((f"{file} {what}" for file, what in manifests.misfits(manifest, found.path)), "")
    row |= {"bytes": describe.disk_bytes(manifest), "cause": describe.cause(manifest.fault, manifest.nodes)}
    return row | {"damage": damage, "age_s": round(time.time() - _when(manifest), 1)}


def _cells(row: dict[str, Any]) -> list[str]:
    job, name = os.path.split(row["path"])
    nbytes = describe.size(row["bytes"]) if "bytes" in row else "?"
    age = describe.age(row["age_s"]) if "age_s" in row else "?"
    cause = describe.plain(f"damaged: {row['damage']}" if row["damage"] else row["cause"])
    return [describe.plain(os.path.basename(job)), name, str(row["minibatch"]), nbytes, age, cause]


def _when(manifest: Manifest) -> float:
    return manifest.times.get("committed", manifest.fault.when)


def _jobs(directory: str) -> list[str]:
    """List the job folders that a directory is or holds."""
    directory = os.path.abspath(directory)
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"{directory}: no such folder")
    if tidy.committed(directory):
        return [directory]
    try:
        below = sorted(os.listdir(directory))
    except OSError as error:
        raise FileNotFoundError(f"{directory}: {error.strerror}") from error
    return [os.path.join(directory, name) for name in below if files.is_folder(os.path.join(directory, name))]


def _resolve(directory: str) -> str:
    """Find the checkpoint that a directory is, or the newest one of a job's folder."""
    path = os.path.abspath(directory)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"{path}: no such folder")
    newest = tidy.committed(path)
    if newest:
        return newest[0].path
    looks = (contract.MANIFEST, contract.CHECKPOINT)
    if tidy.VISIBLE_NAME.fullmatch(os.path.basename(path)) or any(
        os.path.lexists(os.path.join(path, n)) for n in looks
    ):
        return path
    raise FileNotFoundError(f"{path}: no checkpoint here")


def _expected(path: str) -> int:
    try:
        return describe.unique_bytes(manifests.read(path))
    except DamagedError:
        return 0


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, sort_keys=True))


class _Progress:
    """One line on a terminal that shows how far a long read is; silent when there is no terminal."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream, self._total = stream, total
        self._shows = stream.isatty() and total > 0
        self._begin = self._drawn = time.monotonic()
        self.done = 0

    def more(self, nbytes: int) -> None:
        """Count bytes; draw now and then."""
        self.done += nbytes
        now = time.monotonic()
        if self._shows and now - self._drawn >= REDRAW:
            self._drawn = now
            speed = describe.size(int(self.done / (now - self._begin)))
            self._stream.write(f"\rverify: {self.done / self._total:4.0%} of {describe.size(self._total)}, {speed}/s ")
            self._stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._shows:
            self._stream.write("\r\033[K")
            self._stream.flush()
