"""Turn what observe.py saw of this host into findings: the Python of the hooks and of the jobs, the directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from slurm_plugin.findings import Finding
from slurm_plugin.observe import Folder

OLDEST_PYTHON: Final = (3, 11)
NEEDED: Final[Mapping[str, str]] = {
    "torch": "the training itself",
    "h5py": "checkpoints are HDF5 files",
    "numpy": "checkpoints are read and written through it",
}
# What every node sees as one, and what is a node's own, by the names of the kernel's file systems.
SHARED: Final = frozenset(
    (
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "fuse.glusterfs", "cifs", "smb3"),
        *("wekafs", "panfs", "pvfs2", "orangefs", "afs", "ocfs2", "gfs2"),
    )
)
LOCAL: Final = frozenset(["tmpfs", "ramfs", "overlay", "proc", "sysfs", "devtmpfs"])
LITTLE, SCARCE = 10 << 30, 1 << 30  # bytes: parameters and two moments of a model of 1 billion parameters take 12 GB


def commands(found: str | None, by_hooks: str | None, search: str) -> Iterator[Finding]:
    """Look at where scontrol is: for this shell, and for hooks, which get no PATH from Slurm."""
    if found and not by_hooks:
        says = f"scontrol is {found}, and hooks look for it in {search} only"
        advice = (
            "Link scontrol and scancel into /usr/local/bin on all hosts: without them the hooks drain no node and a "
            "requeued job waits."
        )
        yield Finding("Slurm's commands", "problem", says, advice)


def hook_python(path: str, modules: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the interpreter that the hooks run with."""
    advice = "Set python= in /etc/jit-ckpt.conf to a Python of the system, 3.11 or later, on every node."
    if not modules:
        yield Finding("Python of the hooks", "problem", f"{path} does not run here", advice)
    else:
        old = _version(modules["python"]) < OLDEST_PYTHON
        yield Finding(
            "Python of the hooks", "problem" if old else "ok", f"{path}, {modules['python']}", advice if old else ""
        )


def job_python(path: str, modules: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the interpreter of the jobs and what jitmpi needs in it."""
    subject = "Python of the jobs"
    if not modules:
        yield Finding(subject, "unknown", f"{path} did not answer", "Give --python=PATH of the training's interpreter.")
        return
    found = ", ".join(
        f"{name} {modules[name]}" for name in ("python", "torch", "mpi4py", "h5py", "hdf5") if name in modules
    )
    if _version(modules["python"]) < OLDEST_PYTHON:
        yield Finding(subject, "problem", f"{path}: {found}", "jitmpi needs Python 3.11 or later.")
        return
    lacking = [name for name in NEEDED if name not in modules]
    if lacking:
        advice = f"Install what is missing ({', '.join(f'{n}: {NEEDED[n]}' for n in lacking)}), or give --python=PATH."
        yield Finding(subject, "note", f"{path}: {found}; without {', '.join(lacking)}", advice)
    else:
        yield Finding(subject, "ok", f"{path}: {found}")
    if "h5py" in modules and "h5py_error" in modules:
        yield Finding(
            "h5py", "problem", f"does not import: {modules['h5py_error']}", "Install it again for this Python."
        )
    if "mpi" in modules:
        yield Finding("MPI", "ok", f"{modules['mpi'].split(', ')[0]} (mpi4py {modules.get('mpi4py', '?')})")
    else:
        why = modules.get("mpi_error", "not asked in time")
        advice = "Jobs can do without: jit-srun --mpi=none lets the ranks meet through files."
        yield Finding("MPI", "note", f"mpi4py cannot be used: {why}", advice)


def directory(folder: Folder) -> Iterator[Finding]:
    """Look at the directory for checkpoints."""
    subject = "directory"
    if folder.error:
        advice = "Give dir=FOLDER of your own on a file system that every node sees, or set dir in the site's file."
        yield Finding(subject, "problem", f"{folder.path}: {folder.error}", advice)
        return
    free = f"{folder.free / (1 << 30):.1f} GiB free"
    says = f"{folder.path} ({folder.kind or 'unknown file system'}), writable, {free}"
    if folder.links:
        advice = "A checkpoint is committed by a hard link: choose a directory on another file system."
        yield Finding(subject, "problem", f"{says}, but no hard links: {folder.links}", advice)
    elif folder.kind in LOCAL:
        advice = "Every node has its own: choose a directory on a shared file system."
        yield Finding(subject, "problem", f"{says}, which is this host's alone", advice)
    elif 0 <= folder.free < SCARCE:
        yield Finding(
            subject, "problem", says, "A checkpoint of parameters and optimizer needs about 12 bytes a parameter."
        )
    elif folder.free < LITTLE:
        yield Finding(
            subject, "note", says, "A checkpoint of parameters and optimizer needs about 12 bytes a parameter."
        )
    elif folder.kind in SHARED:
        yield Finding(subject, "ok", says)
    else:
        yield Finding(subject, "ok", f"{says}; --probe tells whether the nodes see the same folder")
    if folder.locks:
        advice = "jit-ckpt locks nothing; for h5ls and h5py of your own set HDF5_USE_FILE_LOCKING=FALSE there."
        yield Finding("locks", "note", f"the file system has no flock ({folder.locks})", advice)
    else:
        yield Finding(
            "locks", "ok", "flock works, so HDF5 programs open checkpoints as usual; jit-ckpt itself locks nothing"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
