"""Turn the kernel's log since a record into findings: GPUs (Xid), memory (MCE, EDAC), disks and file systems.

Rule 1: only what the kernel itself wrote counts (facility 0); programs, root's too, get another facility in /dev/kmsg.
Rule 2: a message counts from its first character on. "<name>[<pid>]: segfault at ... in <file>" has a user's words in
        it: 15 characters at most, and a "[" behind them. So every beginning here is longer, or goes over no "[".
Rule 3: what a broken program can cause is not here: Xid 13, 31, 43 and their like.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from slurm_plugin.evidence import BAD, SUSPECT, Finding

CHECK: Final = "kernel"
DEVICE: Final = "/dev/kmsg"
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
LONGEST: Final = 8192  # bytes of a record
MOST: Final = 200_000  # records that are read at all

# NVIDIA's catalogue of Xid errors: those by which the GPU, its link or its memory is at fault, and not the program.
FATAL: Final = {
    48: "uncorrectable memory error",
    62: "microcontroller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    119: "GPU system processor does not answer",
    120: "GPU system processor failed",
    140: "uncorrectable memory error",
    143: "initialization failed",
}
_DISK: Final = r"(?:sd[a-z]+|nvme\d+n\d+|vd[a-z]+|md|dm-)\d*(?:p\d+)?"  # not loop, fd or sr: users have those

_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)[^)]*\): (\d+)\b")
_BEGINNINGS: Final = tuple(
    (re.compile(pattern, re.DOTALL), grade, what)
    for pattern, grade, what in (
        (r"NVRM: (?:[^\[]*\b)?fallen off the bus", BAD, "a GPU has fallen off the bus"),
        (r"amdgpu [0-9a-f:.]+: (?:amdgpu: )?[^\[]*uncorrectable hardware errors", BAD, "uncorrectable errors of a GPU"),
        (r"mce: \[Hardware Error\]: CPU \d+: Machine Check Exception", BAD, "machine check exception"),
        (r"mce: Uncorrected hardware memory error", BAD, "uncorrected memory error"),
        (r"Memory failure: 0x[0-9a-f]+: recovery action", BAD, "uncorrected memory error"),
        (r"EDAC MC\d+: \d+ UE [a-z]", BAD, "uncorrected memory error"),
        (r"\{\d+\}\[Hardware Error\]: event severity: (?:fatal|recoverable)", BAD, "uncorrected hardware error"),
        (r"pcieport [0-9a-f:.]+: AER: Uncorrect(?:ed|able) \(Fatal\)", SUSPECT, "fatal PCIe error"),
        (
            rf"(?:blk_update_request: |print_req_error: )?(?:I/O|critical medium|critical target) error, dev {_DISK}\b",
            SUSPECT,
            "disk I/O error",
        ),
        (rf"Buffer I/O error on dev(?:ice)? {_DISK}\b", SUSPECT, "disk I/O error"),
        (rf"EXT4-fs error \(device {_DISK}\)", SUSPECT, "file system error"),
        (rf"XFS \({_DISK}\): [^\[]*(?:I/O error|[Cc]orruption|shut ?down)", SUSPECT, "file system error"),
        (r"nvme nvme\d+: (?:I/O [^\[]*timeout|controller is down)", SUSPECT, "NVMe controller does not answer"),
    )
)


class Record(NamedTuple):
    """One record of the kernel's: its number since boot, and its text."""

    number: int
    text: str


class Position(NamedTuple):
    """A place in the log: everything up to record `number` of this boot."""

    boot: str
    number: int


def parse_record(raw: bytes) -> tuple[int, Record | None]:
    """Read "<priority>,<number>,<microseconds>,<flags>;<text>": the number, and the record if the kernel wrote it.

    Raises:
        ValueError: it is no record.
    """
    head, _, rest = raw.partition(b";")
    priority, number = head.split(b",")[:2]
    text = rest.partition(b"\n")[0].decode("ascii", "replace").replace("\\x0a", " ")
    return int(number), Record(int(number), text) if int(priority) < 8 else None


def judge(text: str) -> Finding | None:
    """Say what a record's text means for the node."""
    xid = _XID.match(text)
    if xid:
        gpu, number = xid.group(1), int(xid.group(2))
        return Finding(CHECK, BAD, f"GPU {gpu} Xid {number}: {FATAL[number]}") if number in FATAL else None
    for pattern, grade, what in _BEGINNINGS:
        if pattern.match(text):
            return Finding(CHECK, grade, f"{what} ({text})")
    return None


def read(after: int, path: str = DEVICE) -> tuple[list[Finding], int]:
    """Judge what was written after record `after`; return the findings and the last record's number.

    Raises:
        OSError: the log cannot be read (not every container may).
    """
    findings: dict[Finding, None] = {}
    last = 0
    for number, record in records(path):
        last = max(last, number)
        if record and number > after and (found := judge(record.text)):
            findings[found] = None
    return list(findings), last


def end(path: str = DEVICE) -> int:
    """Return the number of the last record.

    Raises:
        OSError: the log cannot be read.
    """
    return max((number for number, _ in records(path)), default=0)


def records(path: str) -> Iterator[tuple[int, Record | None]]:
    """Read the whole log as it is now, record by record."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(MOST):
            try:
                raw = os.read(file, LONGEST)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            if not raw:
                return
            try:
                yield parse_record(raw)
            except ValueError:
                continue
    finally:
        os.close(file)


def boot_id(path: str = BOOT_ID) -> str:
    """Return what tells this boot of the node from others.

    Raises:
        OSError: there is no such file.
    """
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def parse_position(text: bytes) -> Position | None:
    """Read what `write_position` wrote; None for anything else."""
    found = re.fullmatch(rb"([0-9a-f-]{1,64}) (\d{1,18})\n?", text)
    return Position(found.group(1).decode(), int(found.group(2))) if found else None


def write_position(position: Position) -> bytes:
    """Write a position as one line."""
    return f"{position.boot} {position.number}\n".encode()
