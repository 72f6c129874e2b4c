"""A real quota is exceeded while the state is written: EDQUOT comes late and from the kernel, not from a fake.

The file system is btrfs with a quota group, in a file: its quotas need no option of the kernel beside btrfs itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import Cluster
from tests.slurm.training import Training, assert_equal, submit

LIMIT = "64K"  # less than a share of the state


@pytest.fixture
def disks(cluster: Cluster, out: Path) -> Path:
    """A folder with one file system a rank, whose quota holds no share of the state."""
    folder = out.with_name(f"{out.name}-disks")
    folder.mkdir()
    script = (
        "mkdir at; for rank in 0 1 2; do truncate -s 128M $rank; mkfs.btrfs -q -m single $rank; "
        f"mount -o loop $rank at; btrfs quota enable at; btrfs qgroup limit {LIMIT} 0/5 at; "
        "chmod 1777 at; sync; umount at; done"
    )
    done = cluster.on("head", "sh", "-euc", script, cwd=str(folder), check=False)
    if done.returncode:
        pytest.skip(f"no file system with a quota can be made here: {done.stderr.strip()}")
    return folder


def test_a_quota_exceeded_on_one_saver_is_taken_over(
    cluster: Cluster, reference: Training, out: Path, disks: Path
) -> None:
    """The other survivor writes its share too."""
    disk = f"--disks={disks}"
    run = submit(cluster, out, "kill:backward:1:12", "quota:save:2:0", trainee=(disk,))
    assert run.end() == "COMPLETED", run.log
    assert_equal(run, reference)
    assert [file["rank"] for file in run.manifests()[0]["files"]] == [0]
    assert "quota" in run.log


def test_a_quota_exceeded_everywhere_ends_with_the_original_error(cluster: Cluster, out: Path, disks: Path) -> None:
    """Nothing looks complete; both the failure and what to do about the quota are said."""
    disk = f"--disks={disks}"
    run = submit(cluster, out, "raise:backward:1:12:any", "quota:save:all:0:any", trainee=(disk,))
    assert run.end() == "FAILED", run.log
    assert not run.manifests()
    assert "injected into rank 1" in run.log
    assert "Disk quota exceeded" in run.log
    assert "raise the quota" in run.log
