from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jitmpi import commit, manifests
from jitmpi.errors import ClaimedError, SaveError


def test_a_commit_makes_one_visible_checkpoint(job: Any, state: Any) -> None:
    """After a commit the folder has its visible name, private modes, and nothing half-written lies beside it."""
    manifest = job.checkpoint(5, 0, state)
    assert job.names() == {"m5-r0", "claim-r0.json"}
    assert manifest.directory == os.path.join(job.directory, "m5-r0")
    assert set(os.listdir(manifest.directory)) == {"rank0.h5", "rank2.h5", "checkpoint.h5", "manifest.json"}
    for name in os.listdir(manifest.directory):
        assert stat.S_IMODE(os.stat(os.path.join(manifest.directory, name)).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(manifest.directory).st_mode) == 0o700
    assert manifests.read(manifest.directory) == manifest
    assert manifest.times["committed"] > manifest.times["saved"]


def test_the_claim_is_the_manifest(job: Any) -> None:
    """Plain JSON under the claim's name, one file with the manifest: who reads either knows the whole."""
    manifest = job.checkpoint(5, 3)
    claim = os.path.join(job.directory, "claim-r3.json")
    assert os.path.samefile(claim, os.path.join(manifest.directory, "manifest.json"))
    raw = json.loads(Path(claim).read_text())
    assert (raw["minibatch"], raw["attempt"], raw["directory"]) == (5, 3, manifest.directory)


def test_an_attempt_commits_once(job: Any, state: Any) -> None:
    """The second side of a cut network gets ClaimedError, loses its files, and leaves the first one's alone."""
    first = job.checkpoint(5, 0, state)
    plan = job.plan(6, 0, savers=(1,))
    with pytest.raises(ClaimedError, match=r"claim-r0\.json"):
        job.commit(plan, state, job.write(plan, state), 0)
    assert job.names() == {"m5-r0", "claim-r0.json"}
    assert manifests.read(first.directory) == first


def test_before_claim_can_still_call_it_off(job: Any, state: Any) -> None:
    """What before_claim raises comes out, nothing is committed, and the folder is gone."""

    def stop() -> None:
        assert job.names() == {".m5-r0-e1-c0"}  # and all of it written
        raise TimeoutError("a newer plan")

    with pytest.raises(TimeoutError, match="newer plan"):
        job.checkpoint(5, 0, state, before_claim=stop)
    assert job.names() == set()


def test_missing_and_doubled_rows_are_not_committed(job: Any, state: Any) -> None:
    """A set of files that is not the state exactly once never becomes a checkpoint."""
    for wrong in (lambda w: w[:1], lambda w: [*w, replace(w[1], rank=5, file="rank5.h5")]):
        plan = job.plan(5, 0)
        written = wrong(job.write(plan, state))
        with pytest.raises(SaveError, match="rows are missing or doubled"):
            job.commit(plan, state, written, 0)
        assert job.names() == set()


def test_a_file_that_is_not_there_is_not_committed(job: Any, state: Any) -> None:
    """The coordinator looks for every file that was acknowledged."""
    plan = job.plan(5, 0)
    written = job.write(plan, state)
    os.unlink(os.path.join(plan.directory, "rank2.h5"))
    with pytest.raises(SaveError, match=r"rank2\.h5"):
        job.commit(plan, state, written, 0)
    assert job.names() == set()


def test_disk_bytes_stay_near_the_state(job: Any, new_state: Any) -> None:
    """A model of 300 tensors and 30 MB takes less than 1.02 of its bytes, everything in the folder counted."""
    shapes = tuple(
        (f"{kind}/blocks.{n}.mlp.weight{tail}", (100, 250), "float32")
        for n in range(100)
        for kind, tail in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))
    )
    manifest = job.checkpoint(5, 0, new_state(shapes=shapes))
    disk = sum(entry.stat().st_size for entry in os.scandir(manifest.directory))
    assert disk <= 1.02 * sum(tensor.nbytes for tensor in manifest.tensors)


def test_braces_in_a_path_are_no_fields() -> None:
    """The template of the staging folder survives a directory name with braces."""
    template = commit.staging("/data/{me}", 3)
    assert template.format(minibatch=7, epoch=2, coordinator=1) == "/data/{me}/.m7-r3-e2-c1"
