"""Turn the savers' files into one checkpoint: Written -> Manifest.

Rule 1: the exclusive link of the manifest to claim-r<attempt>.json is the commit; all before it can be thrown away, all
    after it is tidying that anybody may do (jitmpi.tidy).
Rule 2: who does not commit removes its own folder, so that nothing on disk looks like a checkpoint that is none.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jitmpi import files, manifests, store, tidy
from jitmpi.errors import ClaimedError, SaveError
from jitmpi.events import Context, Fault, Manifest, SavePlan, TensorInfo, Written
from jitmpi.tidy import finish, prune
from slurm_plugin import contract

__all__ = ["commit", "finish", "prune", "staging"]

log = logging.getLogger("jitmpi")


@dataclass(frozen=True)
class _Where:
    job: str
    aside: str
    claim: str


def staging(job_directory: str, attempt: int) -> str:
    """Name the folder that a plan is written into, hidden and no other plan's.

    A format string with the fields minibatch, epoch and coordinator; `SavePlan.directory` is what it gives.
    """
    plain = job_directory.replace("{", "{{").replace("}", "}}")
    return os.path.join(plain, f".m{{minibatch}}-r{attempt}-e{{epoch}}-c{{coordinator}}")


def commit(
    job_directory: str,
    plan: SavePlan,
    *,
    written: Sequence[Written],
    tensors: Sequence[TensorInfo],
    contexts: Iterable[Context],
    scalars: bytes,
    fault: Fault,
    world: Sequence[str],
    attempt: int,
    job_id: str,
    exact: bool,
    notes: Sequence[str],
    times: Mapping[str, float],
    versions: Mapping[str, str],
    keep: int,
    before_claim: Callable[[], None] = lambda: None,
) -> Manifest:
    """Make what the savers wrote the checkpoint of this attempt; durable when this returns.

    Args:
        world: node name of each rank of the world that wrote it.
        times: seconds since the epoch; "committed" is added.
        keep: committed checkpoints to keep, this one included.
        before_claim: called last before the point of no return; what it raises cancels the commit.

    Raises:
        ClaimedError: another side of a cut network committed this attempt first; `plan.directory` is removed.
        SaveError: not committed: rows missing or doubled, or the file system failed; `plan.directory` is removed.
    """
    where = _Where(
        job=job_directory,
        aside=plan.directory,
        claim=os.path.join(job_directory, contract.CLAIM.format(attempt=attempt)),
    )
    manifest = Manifest(
        job_id=job_id, attempt=attempt, minibatch=plan.minibatch, world_size=len(world),
        directory=tidy.visible_path(job_directory, plan.minibatch, attempt), fault=fault, nodes=tuple(world),
        tensors=tuple(tensors), files=tuple(sorted(written, key=lambda file: file.rank)), index_bytes=0, index_crc32=0,
        exact=exact, notes=tuple(notes), times=dict(times), versions={"h5py": store.version(), **versions},
    )  # fmt: skip
    try:
        _check(manifest, where)
        manifest = _prepare(manifest, where, contexts, scalars)
        before_claim()
        _claim(where)
    except BaseException:
        tidy.remove(where.job, os.path.basename(where.aside))
        raise
    _tidy(where, keep)
    return manifest


def _check(manifest: Manifest, where: _Where) -> None:
    for problem in manifests.uncovered(manifest.tensors, manifest.files):
        raise SaveError(f"the savers' files do not make up the state: {problem}; not committed")
    for file in manifest.files:
        size = files.size_of(os.path.join(where.aside, file.file))
        if size != file.nbytes:
            raise SaveError(f"{where.aside}/{file.file}: {file.nbytes} bytes were written, {size} are there")


def _prepare(manifest: Manifest, where: _Where, contexts: Iterable[Context], scalars: bytes) -> Manifest:
    """Write checkpoint.h5 and the manifest aside, durable; return the manifest as it stands there."""
    image = store.index_image(manifest.tensors, manifest.files, contexts, scalars)
    times = {**manifest.times, "committed": time.time()}
    manifest = replace(manifest, index_bytes=len(image), index_crc32=zlib.crc32(image), times=times)
    try:
        files.write_durably(os.path.join(where.aside, contract.CHECKPOINT), image)
        files.write_durably(os.path.join(where.aside, tidy.ASIDE_MANIFEST), manifests.to_text(manifest))
        files.sync_folder(where.aside)
        files.sync_folder(where.job)  # the folder's own name must be as durable as the claim on it
    except OSError as error:
        raise SaveError(files.explain(where.aside, error, len(image))) from error
    return manifest


def _claim(where: _Where) -> None:
    try:
        won = files.link_exclusively(os.path.join(where.aside, tidy.ASIDE_MANIFEST), where.claim)
    except OSError as error:
        raise SaveError(f"cannot link {where.claim}: {error.strerror}; dir= needs hard links") from error
    if not won:
        raise ClaimedError(f"{where.claim} exists: another side committed this attempt; {where.aside} is removed")
    try:
        files.sync_folder(where.job)
    except OSError as error:  # claimed all the same: others may have seen it, so it cannot be taken back
        log.warning("jit-ckpt: %s: the commit may not survive a power failure: %s", where.claim, error)


def _tidy(where: _Where, keep: int) -> None:
    """Carry on after the commit; whatever fails here is done by the next one that looks."""
    try:
        finish(where.job)
        prune(where.job, keep)
    except OSError as error:
        log.warning("jit-ckpt: %s is committed but not yet in place: %s", where.claim, error)
