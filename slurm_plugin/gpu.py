"""Turn what nvidia-smi, rocm-smi and the amdgpu driver say of a node's GPUs into findings.

Rule 1: the parsers are pure; `nvidia` reads `nvidia-smi -q -d ECC,ROW_REMAPPER`, whose sections differ between drivers,
        by the names of sections and keys, so a driver that lacks one says nothing by it.
Rule 2: a GPU is missed only if slurm.conf, or Slurm for this job, says that the node has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from slurm_plugin.evidence import BAD, SUSPECT, Finding
from slurm_plugin.slurm_text import SlurmError, expand

CHECK: Final = "gpu"
NVIDIA_QUERY: Final = ("-q", "-d", "ECC,ROW_REMAPPER")
AMD_QUERY: Final = ("--showid",)
JOBS_GPUS: Final = ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # what Slurm tells its hooks

# What nvidia-smi prints, with exit code 0 at times, when the driver has lost a GPU.
_LOST: Final = re.compile(r"^(Unable to determine the device handle for .*|.*GPU is lost\b.*)$", re.MULTILINE)
_SLICE: Final = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)  # a MIG instance: there are more of them than GPUs


def nvidia(text: str, code: int | None, expected: int) -> list[Finding]:
    """Judge what nvidia-smi printed; `expected` GPUs are the node's, 0 for not known."""
    if code is None:
        # A hung driver does this; so does a slow start without persistence mode.
        return [Finding(CHECK, SUSPECT, "nvidia-smi does not answer")] if expected else []
    lost = [Finding(CHECK, BAD, line.strip()) for line in _LOST.findall(text)]
    gpus = _sections(text)
    found = lost or missing(len(gpus), expected, _first_line(text) if code else "")
    for name, values in gpus.items():
        found += _of_one(f"GPU {name}", values)
    return found


def amd(text: str, code: int | None, ras: Mapping[str, str], expected: int) -> list[Finding]:
    """Judge what `rocm-smi --showid` printed, and the driver's error counters: "card0/umc" -> "ue: 0\\nce: 3"."""
    if code is None:
        return [Finding(CHECK, SUSPECT, "rocm-smi does not answer")] if expected else []
    seen = set(re.findall(r"^GPU\[(\d+)\]", text, re.MULTILINE))
    found = missing(len(seen), expected, _first_line(text) if code else "")
    for name, counts in sorted(ras.items()):
        errors = re.search(r"^ue: (\d+)", counts, re.MULTILINE)
        if errors and int(errors.group(1)):
            found.append(Finding(CHECK, BAD, f"GPU {name}: {errors.group(1)} uncorrectable errors"))
    return found


def missing(seen: int, expected: int, why: str = "") -> list[Finding]:
    """Compare the GPUs that answer with those that the node should have."""
    if seen >= expected:
        return []
    return [Finding(CHECK, BAD, f"{seen} of {expected} GPUs answer{f' ({why})' if why else ''}")]


def of_node(slurm_conf: str, node: str) -> int:
    """Return the GPUs that slurm.conf gives a node; 0 for none or not told, and where GPUs are shared out in slices."""
    default = ""
    for line in re.sub(r"\\\n", " ", slurm_conf).splitlines():
        if not re.match(r"\s*nodename\s*=", line, re.IGNORECASE):
            continue
        pairs = {key.lower(): value for key, value in re.findall(r"(\w+)\s*=\s*(\S+)", line.partition("#")[0])}
        if pairs["nodename"].upper() == "DEFAULT":
            default = pairs.get("gres", default)
        elif _names(pairs["nodename"], node):
            return _gpus(pairs.get("gres", default))
    return 0


def of_job(environ: Mapping[str, str]) -> int:
    """Return how many GPUs the node must have for the job to have its own: one more than the highest index."""
    given = (re.fullmatch(r"\d{1,3}(,\d{1,3})*", environ.get(name, ""), re.ASCII) for name in JOBS_GPUS)
    return max((1 + int(n) for indices in given if indices for n in indices.group().split(",")), default=0)


def _gpus(gres: str) -> int:
    """Count in "gpu:a100:4(S:0-1),gpu:v100:2,nvme:1"."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *kind = item.lower().split(":")
        if name == "gpu":
            if any(_SLICE.search(k) for k in kind):
                return 0
            total += int(kind[-1]) if kind and kind[-1].isdigit() else 1
    return total


def _names(nodes: str, node: str) -> bool:
    try:
        return node == nodes or node in expand(nodes)
    except SlurmError:
        return False


def _sections(text: str) -> dict[str, dict[tuple[str, ...], str]]:
    """Read nvidia-smi's indented text: GPU -> path of section names and key -> value."""
    gpus: dict[str, dict[tuple[str, ...], str]] = {}
    path: list[tuple[int, str]] = []
    values: dict[tuple[str, ...], str] = {}
    for line in text.splitlines():
        head = re.fullmatch(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])", line.rstrip())
        if head:
            values = gpus.setdefault(head.group(1), {})
            path = []
            continue
        key, colon, value = line.strip().partition(" : ")
        depth = len(line) - len(line.lstrip())
        while path and path[-1][0] >= depth:
            path.pop()
        if colon:
            values[(*(name for _, name in path), key.strip())] = value.strip()
        elif key:
            path.append((depth, key))
    return gpus


def _of_one(gpu: str, values: Mapping[tuple[str, ...], str]) -> list[Finding]:
    errors = sum(_uncorrectable(values.items()))
    found = [Finding(CHECK, BAD, f"{gpu}: {errors} uncorrectable ECC errors")] if errors else []
    if values.get(("ECC Errors", "Aggregate", "SRAM Threshold Exceeded")) == "Yes":
        found.append(Finding(CHECK, BAD, f"{gpu}: more SRAM errors than it may have"))
    if values.get(("Remapped Rows", "Remapping Failure Occurred")) == "Yes":
        found.append(Finding(CHECK, BAD, f"{gpu}: a memory row could not be remapped"))
    elif "Yes" in (values.get(("Remapped Rows", "Pending")), values.get(("Retired Pages", "Pending Page Blacklist"))):
        found.append(Finding(CHECK, SUSPECT, f"{gpu}: memory is to be remapped at the next reset"))
    return found


def _uncorrectable(values: Iterable[tuple[tuple[str, ...], str]]) -> list[int]:
    """Pick the counts since the last reset, of new GPUs (SRAM, DRAM) and of old ones (Double Bit, in total)."""
    return [
        int(value)
        for path, value in values
        if path[:2] == ("ECC Errors", "Volatile")
        and value.isdigit()
        and ("Uncorrectable" in path[-1] or path[2:] == ("Double Bit", "Total"))
    ]


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""
