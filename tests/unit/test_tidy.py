from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from jitmpi import manifests, restore, tidy
from jitmpi.errors import DamagedError


def undo_tidying(job: Any, name: str, aside: str) -> None:
    """Bring a checkpoint back to the moment after the claim, as if the coordinator had died there."""
    folder = os.path.join(job.directory, aside)
    os.rename(os.path.join(job.directory, name), folder)
    os.rename(os.path.join(folder, "manifest.json"), os.path.join(folder, tidy.ASIDE_MANIFEST))


def test_finish_completes_what_a_dead_coordinator_claimed(job: Any) -> None:
    """A claim whose folder is still hidden becomes a visible checkpoint; doing it twice changes nothing."""
    manifest = job.checkpoint(5, 0)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    for _ in range(2):
        tidy.finish(job.directory)
        assert job.names() == {"m5-r0", "claim-r0.json"}
        assert manifests.read(manifest.directory) == manifest


def test_finish_completes_half_tidied_folders(job: Any) -> None:
    """A coordinator that died between the manifest's rename and the folder's is completed as well."""
    manifest = job.checkpoint(5, 0)
    os.rename(manifest.directory, os.path.join(job.directory, ".m5-r0-e1-c0"))
    tidy.finish(job.directory)
    assert job.names() == {"m5-r0", "claim-r0.json"}


def test_finish_takes_the_folder_that_was_claimed(job: Any, state: Any) -> None:
    """Of two folders of one attempt only the one whose manifest is the claim becomes visible."""
    job.write(job.plan(5, 0, epoch=2), state)
    manifest = job.checkpoint(5, 0, state)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    tidy.finish(job.directory)
    assert job.names() == {"m5-r0", ".m5-r0-e2-c0", "claim-r0.json"}
    assert manifests.read(manifest.directory) == manifest


def test_finish_by_many_processes_at_once(job: Any) -> None:
    """All ranks of a relaunch may finish the same claim together."""
    manifest = job.checkpoint(5, 0)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=tidy.finish, args=(job.directory,)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert manifests.read(manifest.directory) == manifest


def test_finish_never_touches_the_running_attempt(job: Any, state: Any) -> None:
    """Half-written folders go only when a later attempt has committed."""
    job.checkpoint(5, 1, state)
    for attempt in (0, 1, 2):
        job.write(job.plan(9, attempt), state)
    tidy.finish(job.directory)
    assert job.names() == {"m5-r1", "claim-r1.json", ".m9-r1-e1-c0", ".m9-r2-e1-c0"}


def test_finish_makes_nothing_visible_without_a_claim(job: Any, state: Any) -> None:
    """A folder with a manifest but no claim stays hidden."""
    job.checkpoint(5, 0, state)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    os.unlink(os.path.join(job.directory, "claim-r0.json"))
    tidy.finish(job.directory)
    assert job.names() == {".m5-r0-e1-c0"}
    assert tidy.committed(job.directory) == []


def test_finish_of_a_damaged_claim_removes_nothing(job: Any, state: Any) -> None:
    """A claim that cannot be read is left, with the folder that may belong to it."""
    job.checkpoint(5, 0, state)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    Path(job.directory, "claim-r0.json").write_text("{")
    job.checkpoint(6, 1, state)
    assert ".m5-r0-e1-c0" in job.names()


def test_finish_of_a_missing_folder_does_nothing(tmp_path: Path) -> None:
    """A job that has saved nothing yet is no error."""
    tidy.finish(str(tmp_path / "none"))
    tidy.prune(str(tmp_path / "none"), 1)
    assert tidy.committed(str(tmp_path / "none")) == []


def test_prune_keeps_the_newest(job: Any, state: Any) -> None:
    """After each commit the newest `keep` stay; an attempt once committed stays committed."""
    for attempt in range(4):
        job.checkpoint(5 + attempt, attempt, state, keep=2)
    assert [found.path.rpartition("/")[2] for found in tidy.committed(job.directory)] == ["m8-r3", "m7-r2"]
    assert {f"claim-r{attempt}.json" for attempt in range(4)} < job.names()
    assert tidy.read_claim(os.path.join(job.directory, "claim-r0.json")) is None
    tidy.finish(job.directory)
    assert len(tidy.committed(job.directory)) == 2


def test_prune_does_not_count_damaged_checkpoints(job: Any, state: Any) -> None:
    """With the newest damaged, the last good one stays, whatever `keep` is."""
    for attempt in range(3):
        job.checkpoint(5 + attempt, attempt, state, keep=9)
    os.truncate(os.path.join(job.directory, "m7-r2", "rank0.h5"), 100)
    tidy.prune(job.directory, 1)
    assert [found.attempt for found in tidy.committed(job.directory)] == [2, 1]


def test_prune_interrupted_is_carried_on(job: Any, state: Any) -> None:
    """A crash in the middle of a removal leaves nothing that looks like a checkpoint; finish removes the rest."""
    job.checkpoint(5, 0, state)
    job.checkpoint(6, 1, state)
    os.rename(os.path.join(job.directory, "m5-r0"), os.path.join(job.directory, ".gone-m5-r0"))
    tidy.finish(job.directory)
    assert job.names() == {"m6-r1", "claim-r0.json", "claim-r1.json"}


@pytest.mark.parametrize("name", ["m4-r0", ".m4-r0-e1-c1", ".gone-m4-r0"])
def test_links_are_never_followed(name: str, job: Any, state: Any, tmp_path: Path) -> None:
    """A link in the job's folder to somewhere else is neither shown nor is its target removed."""
    treasure = tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "file").write_text("x")
    (Path(job.directory) / name).symlink_to(treasure)
    job.checkpoint(8, 3, state, keep=1)
    job.checkpoint(9, 4, state, keep=1)
    tidy.remove(job.directory, name)
    tidy.remove(job.directory, f"../../{treasure.name}")
    assert (treasure / "file").read_text() == "x"
    assert [found.minibatch for found in tidy.committed(job.directory)] == [9]


def test_a_job_folder_that_is_a_link_is_left_alone(job: Any, state: Any, tmp_path: Path) -> None:
    """Nothing is finished or removed through a link in place of the job's folder."""
    for attempt in range(3):
        job.checkpoint(5 + attempt, attempt, state, keep=9)
    (tmp_path / "link").symlink_to(job.directory)
    tidy.prune(str(tmp_path / "link"), 1)
    assert len(tidy.committed(job.directory)) == 3


def give_away(path: str) -> None:
    """Let a file or folder, and all in it, belong to another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for folder, _, names in os.walk(path):
        for name in (folder, *(os.path.join(folder, n) for n in names)):
            os.chown(name, 12345, 12345)
    os.chown(path, 12345, 12345)


def test_what_another_user_planted_does_not_count(job: Any) -> None:
    """In a folder that others can write, their checkpoints are not listed, finished, or removed."""
    job.checkpoint(5, 0)
    planted = job.checkpoint(9, 7)
    give_away(planted.directory)
    assert [found.minibatch for found in tidy.committed(job.directory)] == [5]
    assert restore.candidates(job.directory) == [os.path.join(job.directory, "m5-r0")]
    tidy.remove(job.directory, "m9-r7")
    tidy.prune(job.directory, 1)
    assert {"m5-r0", "m9-r7"} <= job.names()


def test_a_planted_claim_makes_nothing_visible(job: Any) -> None:
    """A claim of another user commits nothing, even for a folder that is ours."""
    job.checkpoint(5, 0)
    undo_tidying(job, "m5-r0", ".m5-r0-e1-c0")
    give_away(os.path.join(job.directory, "claim-r0.json"))
    tidy.finish(job.directory)
    assert job.names() == {".m5-r0-e1-c0", "claim-r0.json"}


def test_no_file_of_another_user_is_read(job: Any) -> None:
    """A job's own checkpoint is read from files of its owner only, should one be swapped under its name."""
    manifest = job.checkpoint(5, 0)
    restore.Source(manifest.directory, os.geteuid()).close()
    give_away(os.path.join(manifest.directory, "checkpoint.h5"))
    with restore.Source(manifest.directory, os.geteuid()) as source, pytest.raises(DamagedError, match="user id 12345"):
        source.contexts()
    give_away(os.path.join(manifest.directory, "manifest.json"))
    with pytest.raises(DamagedError, match="user id 12345"):
        restore.Source(manifest.directory, os.geteuid())
    restore.Source(manifest.directory).close()
