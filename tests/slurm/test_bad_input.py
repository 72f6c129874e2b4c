"""What users get wrong on a real cluster: one clear answer, and nothing started blindly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, submit


@pytest.fixture(scope="module")
def checkpoint(shared_cluster: Cluster) -> Path:
    """A good checkpoint of an earlier job, of three ranks."""
    run = submit(shared_cluster, shared_cluster.pfs / "earlier", "kill:forward:1:12")
    assert run.end() == "COMPLETED", run.log
    (found,) = run.checkpoints.glob("m*")
    return found


def refused(run: Training, *words: str) -> None:
    """The job ended at once, with a line that says why, and was not tried again."""
    assert run.end() == "FAILED", run.log
    assert run.cluster.job(run.job)["ExitCode"] == "85:0"
    assert all(word in run.log for word in words), run.log
    assert not run.rows(0)


def test_an_earlier_jobs_checkpoint_is_taken_up(
    cluster: Cluster, reference: Training, checkpoint: Path, out: Path
) -> None:
    """resume=: a new job goes on where the other one was saved, to the same end."""
    run = submit(cluster, out, options=f"resume={checkpoint}")
    assert run.end() == "COMPLETED", run.log
    assert run.finals() == reference.finals()
    assert run.rows(0)[0]["minibatch"] == 12


def test_a_checkpoint_of_another_model_is_refused(cluster: Cluster, checkpoint: Path, out: Path) -> None:
    """The first differences are listed."""
    run = submit(cluster, out, options=f"resume={checkpoint}", trainee=("--width=16",))
    refused(run, "does not fit this job", "model/embed.weight", "[64, 32]", "[64, 16]")


def test_a_checkpoint_of_another_world_is_refused(cluster: Cluster, checkpoint: Path, out: Path) -> None:
    """Two ranks cannot take up what three left."""
    refused(submit(cluster, out, options=f"resume={checkpoint}", ranks=2), "3", "2", "rank")


def test_a_damaged_checkpoint_is_never_loaded(cluster: Cluster, checkpoint: Path, out: Path) -> None:
    """A flipped bit in a saver's file: refused, with the file and the dataset."""
    damaged = cluster.pfs / "damaged" / checkpoint.name
    shutil.copytree(checkpoint, damaged, dirs_exist_ok=True)
    manifest = json.loads((damaged / "manifest.json").read_text())
    largest = max(manifest["files"], key=lambda file: file["nbytes"])
    raw = bytearray((damaged / largest["file"]).read_bytes())
    raw[len(raw) // 2] ^= 1
    (damaged / largest["file"]).write_bytes(raw)
    refused(submit(cluster, out, options=f"resume={damaged}"), largest["file"])


def test_a_wrong_pmi_is_named(cluster: Cluster, out: Path) -> None:
    """MPI over the wrong PMI makes singletons; the answer names the MPI, the PMI and the fix."""
    run = submit(cluster, out, srun=("--mpi=pmi2",))
    assert run.end() == "FAILED", run.log
    assert "pmi2" in run.log
    assert "--mpi=" in run.log
    assert not run.rows(0)


def test_without_mpi_the_ranks_meet_through_files(cluster: Cluster, reference: Training, out: Path) -> None:
    """--mpi=none: the same protection, said in one line."""
    run = submit(cluster, out, "kill:backward:1:12", srun=("--mpi=none",))
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert "the ranks meet through files" in run.log


def test_a_full_disk_on_one_rank_is_taken_over(cluster: Cluster, reference: Training, out: Path) -> None:
    """One saver's write fails; the other survivors write its share."""
    run = submit(cluster, out, "kill:backward:1:12", "full:save:2:0")
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert [file["rank"] for file in run.manifests()[0]["files"]] == [0]


def test_a_full_disk_everywhere_ends_with_the_original_error(cluster: Cluster, out: Path) -> None:
    """Nothing can be written: the job ends as it would have, both reasons are said, nothing looks complete."""
    run = submit(cluster, out, "raise:backward:1:12:any", "full:save:all:0:any")
    assert run.end() == "FAILED", run.log
    assert not run.manifests()
    assert "injected into rank 1" in run.log
    assert "No space left on device" in run.log
