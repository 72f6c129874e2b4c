"""demo.play: the job is followed to its end, and the power is cut once, on the right node, at the right time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.play import FAILED_RANK, Job, PowerCut, follow, keep, launch_nodes, newest_minibatch, tail
from demo.record import DemoError

NODES = ["n1", "n2", "n3", "n4"]


class FakeCluster:
    """A cluster whose job goes through `states` and stays in the last one."""

    def __init__(self, *states: str, batch_host: str = "n1") -> None:
        self.states, self.batch_host, self.cut = list(states), batch_host, list[str]()

    def job(self, job: str) -> dict[str, str]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"JobState": state, "BatchHost": self.batch_host}

    def off(self, node: str) -> None:
        self.cut.append(node)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job("7", tmp_path / "output.txt", tmp_path / "out", tmp_path / "checkpoints" / "7")
    job.out.mkdir()
    job.folder.mkdir(parents=True)
    launch = {"entry": "launch", "time": 1.0, "nodes": NODES}
    (job.folder / "journal.jsonl").write_text(json.dumps(launch) + "\n")
    for rank, minibatches in ((0, 4), (1, 5)):
        lines = [{"minibatch": m, "loss": "0x0p+0", "time": 1.0} for m in range(minibatches)]
        (job.out / f"loss-rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return job


def test_the_output_is_shown_to_its_last_line(job: Job) -> None:
    """Every line is said once, and the newest minibatch is told."""
    job.log.write_text("one\ntwo\n")
    said: list[str] = []
    seen: list[int] = []
    follow(FakeCluster("PENDING", "RUNNING", "COMPLETED"), job, said.append, seen.append)  # type: ignore[arg-type]
    assert said == ["one", "two"]
    assert seen[-1] == 4


def test_a_failed_job_is_an_error_with_its_last_words(job: Job) -> None:
    """The demo does not go on, and whoever reads it sees why the job failed."""
    job.log.write_text("the reason\n")
    with pytest.raises(DemoError, match=r"FAILED.*\n.*the reason"):
        follow(FakeCluster("RUNNING", "FAILED"), job, str, lambda minibatch: None)  # type: ignore[arg-type]


def test_the_power_is_cut_once_where_the_rank_is(job: Job) -> None:
    """Not before its minibatch, not twice, on the node of the chosen rank."""
    cluster = FakeCluster("RUNNING")
    power = PowerCut(cluster, job, 4, str)  # type: ignore[arg-type]
    for newest in (-1, 3, 4, 5):
        power.look(newest)
    assert cluster.cut == ["n3"]
    assert power.failure is not None
    assert (power.failure.node, power.failure.rank) == ("n3", FAILED_RANK)


def test_the_batch_host_is_left_alone(job: Job) -> None:
    """The demo is about a node that is not the batch host; otherwise it says so."""
    with pytest.raises(DemoError, match="batch host"):
        PowerCut(FakeCluster("RUNNING", batch_host="n3"), job, 0, str).look(1)  # type: ignore[arg-type]


def test_what_the_run_left_is_kept(job: Job, tmp_path: Path) -> None:
    """Losses, journal and output survive the cluster; an older copy does not mix in."""
    job.log.write_text("said\n")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "old").touch()
    record = keep(job, tmp_path / "kept")
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {"journal.jsonl", "loss-rank0.jsonl", "loss-rank1.jsonl", "output.txt"}
    assert list(record.losses) == [0, 1]


def test_small_readers(job: Job, tmp_path: Path) -> None:
    """The nodes of a launch, the newest minibatch of any rank, the end of a text."""
    assert launch_nodes(job) == tuple(NODES)
    assert (newest_minibatch(job.out), newest_minibatch(tmp_path)) == (4, -1)
    assert tail("a\nb\nc", 2) == "b\nc"
    (job.folder / "journal.jsonl").unlink()
    with pytest.raises(DemoError, match="no launch"):
        launch_nodes(job)
