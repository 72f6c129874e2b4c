"""Turn manifests into words for people. Pure: no I/O, no clock.

Rule: text that came out of a file is shown without control characters, or a checkpoint could write to the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from jitmpi.events import Fault, Manifest, TensorInfo

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
MOMENTS = ("detected", "settled", "agreed", "saved", "committed")  # after "fault"


def plain(text: str) -> str:
    """Make text safe for a terminal and one line."""
    return "".join(c if c.isprintable() else " " for c in text)


def size(nbytes: int) -> str:
    """Say a number of bytes with three digits: 31.2 MB."""
    number, unit = float(nbytes), 0
    while number >= 999.5 and unit < len(UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {UNITS[unit]}"


def age(seconds: float) -> str:
    """Say how long ago in one unit: 5 min."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def cause(fault: Fault, nodes: Sequence[str]) -> str:
    """Say in a few words what the checkpoint comes from: "rank 2 on n3 died"."""
    names = ", ".join(f"{rank} on {plain(nodes[rank])}" for rank in fault.ranks if 0 <= rank < len(nodes))
    who = f"rank{'s' if len(fault.ranks) > 1 else ''} {names}" if names else "a rank"
    what = {
        "death": "died",
        "hang": "made no progress",
        "exception": "raised an exception",
        "signal": "got a signal to end",
    }.get(fault.kind, plain(fault.kind))
    return f"{who} {what}" if fault.kind != "signal" else f"planned end: {who} {what}"


def story(manifest: Manifest) -> str:
    """Tell in one sentence from which failure a checkpoint comes."""
    fault = manifest.fault
    text = cause(fault, manifest.nodes)
    if fault.unreachable:
        cut = sorted({plain(manifest.nodes[rank]) for rank in fault.unreachable if 0 <= rank < len(manifest.nodes)})
        text += f", {', '.join(cut)} no longer answered"
    if fault.minibatch >= 0:
        text += f", in minibatch {fault.minibatch}"
    return text + (f": {plain(fault.detail)}" if fault.detail else "")


def unique_bytes(manifest: Manifest) -> int:
    """Bytes of the state itself."""
    return sum(tensor.nbytes for tensor in manifest.tensors)


def disk_bytes(manifest: Manifest) -> int:
    """Bytes of the files that hold it, without the manifest."""
    return manifest.index_bytes + sum(file.nbytes for file in manifest.files)


def dtypes(tensors: Sequence[TensorInfo]) -> dict[str, tuple[int, int]]:
    """Count tensors and bytes by dtype, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        count, nbytes = found.get(tensor.dtype, (0, 0))
        found[tensor.dtype] = count + 1, nbytes + tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def summary(manifest: Manifest) -> list[str]:
    """Describe a checkpoint in some lines."""
    nodes = dict.fromkeys(plain(node) for node in manifest.nodes)
    kinds = ", ".join(f"{n} {plain(k)} ({size(b)})" for k, (n, b) in dtypes(manifest.tensors).items())
    exact = "yes" if manifest.exact else "no: a rank's random state or data position had to be made up"
    lines = [
        ("checkpoint", plain(manifest.directory)),
        ("job", f"{plain(manifest.job_id)}, attempt {manifest.attempt}"),
        ("minibatch", f"{manifest.minibatch} (the next to run)"),
        ("cause", story(manifest)),
        ("exact", exact),
        *(("note", plain(note)) for note in manifest.notes),
        ("world", f"{manifest.world_size} ranks on {', '.join(nodes)}"),
        ("state", f"{len(manifest.tensors)} tensors, {size(unique_bytes(manifest))}: {kinds}"),
        ("files", f"{len(manifest.files)} rank files and checkpoint.h5, {size(disk_bytes(manifest))}"),
        ("times", moments(manifest.times)),
        ("made by", ", ".join(f"{plain(k)} {plain(str(v))}" for k, v in sorted(manifest.versions.items()))),
    ]
    return [f"{name:<11} {text}" for name, text in lines]


def moments(times: Mapping[str, float]) -> str:
    """Say when the fault was and how many seconds after it each stage was done."""
    begin = times.get("fault", min(times.values(), default=0.0))
    try:
        first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin))
    except (OverflowError, ValueError, OSError):
        first = f"{begin:g}"
    steps = [f"{name} +{times[name] - begin:.2f} s" for name in MOMENTS if name in times]
    return ", ".join([f"fault {first}", *steps])


def tensor_line(tensor: TensorInfo) -> str:
    """Describe one tensor: name, dtype and shape, size."""
    return f"{plain(tensor.name)}  {plain(tensor.dtype)}{list(tensor.shape)}  {size(tensor.nbytes)}"
