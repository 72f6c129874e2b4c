"""The door to Slurm: one contract for scontrol's text, for pyslurm and for the fake that other tests use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_plugin.slurm import ScontrolSlurm, Slurm, run_command
from slurm_plugin.slurm_native import PyslurmSlurm
from slurm_plugin.slurm_text import JobInfo, NodeInfo, SlurmError
from tests.door_contract import DoorContract, World
from tests.unit.fake_slurm import FakeSlurm


def written(when: float) -> str:
    """Write a time as Slurm does."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(when))


class Scontrol:
    """Answers commands as Slurm's own would, from the state of a fake."""

    def __init__(self, fake: FakeSlurm) -> None:
        self.fake = fake

    def __call__(self, command: Sequence[str], patience: float) -> str:
        match list(command):
            case ["scontrol", "show", "job", job]:
                tasks = [j for j in self.fake.jobs.values() if j.array_job == job]
                return "\n\n".join(map(self._job, tasks or [self.fake.job(job)]))
            case ["scontrol", "show", "node", *names]:
                wanted = names[0].split(",") if names else list(self.fake.known)
                if unknown := set(wanted) - set(self.fake.nodes(wanted)):
                    raise SlurmError(f"scontrol show node: Node {unknown.pop()} not found")  # and exit code 1
                return "\n".join(self._node(n) for n in self.fake.nodes(wanted).values())
            case ["scontrol", "show", "partition", name]:
                return (
                    f"PartitionName={name}\n   AllowGroups=ALL\n   Nodes={','.join(self.fake.partition_nodes(name))}\n"
                )
            case ["scontrol", "show", "config"]:
                boot = f"BOOT_TIME               = {written(self.fake.booted())}\n"
                return f"{boot}SlurmctldPort           = 6817\nSlurmdPort              = 6818\n"
            case ["scontrol", "show", "step", job] if self.fake.job(job).state == "PENDING":
                raise SlurmError(f"scontrol show step {job}: Job step {job}. not found")
            case ["scontrol", "show", "step", _]:
                steps = [f"StepId=1.{s} UserId=0\n   SrunHost:Pid=n1:{p}" for p, s in self.fake.steps.items()]
                return "StepId=1.batch UserId=0\n   SrunHost:Pid=(null):0\n\n" + "\n\n".join(steps)
            case ["scontrol", "update", node, "State=DRAIN", why] if node.startswith("NodeName="):
                self.fake.drain(node.removeprefix("NodeName="), why.removeprefix("Reason="))
            case ["scontrol", "ping"]:
                if not self.fake.answers():
                    raise SlurmError("scontrol ping: exit code 1")
            case ["scontrol", "release", job]:
                self.fake.release(job)
            case ["scontrol", "requeue", job]:
                self.fake.requeue(job)
            case ["scontrol", "update", job, *changes]:
                values = dict(c.split("=") for c in changes)
                exclude = values.get("ExcNodeList")
                self.fake.update(
                    job.removeprefix("JobId="),
                    start_time=values.get("StartTime", ""),
                    exclude=None if exclude is None else [n for n in exclude.split(",") if n],
                )
            case ["scancel", job]:
                self.fake.cancel(job)
            case ["scancel", "--ctld", "-s", name, target]:
                job, step = target.split(".")
                self.fake.cancel_step(job, step, name)
            case other:
                raise AssertionError(other)
        return ""

    @staticmethod
    def _job(job: JobInfo) -> str:
        array = f" ArrayJobId={job.array_job} ArrayTaskId={job.array_task}" if job.array_job else ""
        preempted = "   PreemptTime=2026-01-01T00:00:00\n" if job.preempted else ""
        return (
            f"JobId={job.job_id}{array} JobName=a JobState=CANCELLED b\n"
            f"   JobState={job.state} Reason=None Dependency=(null)\n"
            f"   Requeue={int(job.may_requeue)} Restarts={job.restarts} BatchFlag={int(job.batch)} Reboot=0\n"
            f"   RunTime=00:01:00 TimeLimit=01:00:00 TimeMin=N/A\n{preempted}"
            f"   SubmitTime={written(job.submitted)}\n"
            "   StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T01:00:00 Deadline=N/A\n"
            f"   ReqNodeList={','.join(job.required) or '(null)'} ExcNodeList={','.join(job.excluded) or '(null)'}\n"
            f"   NodeList={','.join(job.nodes) or '(null)'}\n   BatchHost={job.batch_host or '(null)'}\n"
            f"   Partition={job.partition} AllocNode:Sid=head:1\n   NumNodes={job.width}-9 NumCPUs=2\n"
            "   Command=/bin/x NodeList=evil\n"
        )

    @staticmethod
    def _node(node: NodeInfo) -> str:
        port = f" Port={node.port}" if node.port != 6818 else ""
        reason = f"\n   Reason={node.reason}" if node.reason else ""
        return f"NodeName={node.name} Arch=x\n   NodeAddr={node.address} Version=1{port}\n   State={node.state}{reason}"


def pyslurm(fake: FakeSlurm) -> Any:
    """Build a module with the parts of pyslurm that are used, on the state of a fake."""

    class Job(SimpleNamespace):
        @staticmethod
        def load(number: int) -> Job:
            return Job.of(next((j for j in fake.jobs.values() if j.array_job == str(number)), fake.job(str(number))))

        @staticmethod
        def of(info: JobInfo) -> Job:
            return Job(
                id=int(info.job_id),
                key=next(k for k, j in fake.jobs.items() if j is info),
                state=info.state,
                requeue_count=info.restarts,
                allocated_nodes=",".join(info.nodes) or None,
                batch_host=info.batch_host or None,
                excluded_nodes=",".join(info.excluded) or None,
                required_nodes=",".join(info.required) or None,
                preempt_time=1 if info.preempted else None,
                end_time=info.end or None,
                submit_time=info.submitted or None,
                is_batch_job=info.batch,
                is_requeueable=info.may_requeue,
                array_id=int(info.array_job) if info.array_job else None,
                array_task_id=int(info.array_task) if info.array_task else None,
                partition=info.partition or None,
                num_nodes=info.width or None,
            )

        def release(self) -> None:
            fake.release(self.key)

        def requeue(self) -> None:
            fake.requeue(self.key)

        def cancel(self) -> None:
            fake.cancel(self.key)

        def modify(self, changes: SimpleNamespace) -> None:
            exclude = getattr(changes, "excluded_nodes", None)
            names = None if exclude is None else [n for n in exclude.split(",") if n]
            fake.update(self.key, start_time=getattr(changes, "begin_time", ""), exclude=names)

    class Node(SimpleNamespace):
        @staticmethod
        def load(name: str) -> Node:
            return Node(**vars(fake.node(name)))

        def modify(self, changes: Node) -> None:
            assert changes.state == "DRAIN"
            fake.drain(self.name, changes.reason)

    class JobStep:
        def __init__(self, job: int, step: int) -> None:
            self.job, self.step = job, step

        def send_signal(self, name: str) -> None:
            fake.cancel_step(str(self.job), str(self.step), name.removeprefix("SIG"))

    steps = {s: SimpleNamespace(id=int(s), srun_process_id=p) for p, s in fake.steps.items()}
    return SimpleNamespace(
        Job=Job,
        Node=Node,
        JobStep=JobStep,
        JobSubmitDescription=SimpleNamespace,
        JobSteps=SimpleNamespace(load=lambda job: steps if fake.running_steps(str(job)) else {}),
        Jobs=SimpleNamespace(load=lambda: {int(j.job_id): Job.of(j) for j in fake.jobs.values()}),
        Nodes=SimpleNamespace(load=lambda: fake.nodes(fake.known) and {n: Node.load(n) for n in fake.known}),
    )


def fake_cluster() -> FakeSlurm:
    """Build a small cluster: a running job, a task of an array, three nodes, a step."""
    end = time.mktime(time.strptime("2026-01-01T01:00:00", "%Y-%m-%dT%H:%M:%S"))
    running = JobInfo("7", "RUNNING", nodes=("n1", "n2"), batch_host="n1", excluded=("n9",), end=end, restarts=2)
    running = replace(running, partition="main", width=2, submitted=end - 7200, required=("n1",))
    task = JobInfo("101", "RUNNING", nodes=("n3",), batch_host="n3", end=end, array_job="100", array_task="5")
    nodes = [NodeInfo("n1", "MIXED", "", "10.0.0.1", 6818), NodeInfo("n2", "DOWN*", "no word", "10.0.0.2", 7000)]
    fake = FakeSlurm({"7": running, "100_5": task}, nodes, steps={4242: "3"})
    fake.boot = end - 9000
    return fake


class Contract(DoorContract):
    """What every way to Slurm must do; on a fake also to the last field."""

    @pytest.fixture
    def fake(self) -> FakeSlurm:
        """The state behind it."""
        return fake_cluster()

    @pytest.fixture
    def slurm(self, fake: FakeSlurm) -> Slurm:
        """The way under test."""
        raise NotImplementedError

    @pytest.fixture
    def world(self, fake: FakeSlurm) -> World:
        """The jobs and nodes of the contract, added to the fake's own."""
        fake.jobs["5"] = JobInfo("5", "RUNNING", nodes=("n3", "n4"), batch_host="n3", submitted=fake.boot + 1)
        fake.jobs["6"] = JobInfo("6", "PENDING")
        for name in ("n3", "n4", "n5"):
            fake.known[name] = NodeInfo(name, "IDLE" if name == "n5" else "ALLOCATED", "", name, 6818)
        fake.jobs["100_6"] = JobInfo("100", "RUNNING", nodes=("n3",), array_job="100", array_task="6")
        return World("5", ("n3", "n4"), "6", "100_5", "n5", numbers={"101": "100_5", "100": "100_6"})

    @pytest.fixture
    def door(self, slurm: Slurm) -> Slurm:
        """The same way, as the contract calls it."""
        return slurm

    def test_silence_is_told_from_a_refusal(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """Both are a SlurmError to whoever asked; only with silence nothing answers."""
        assert slurm.answers()
        with pytest.raises(SlurmError):
            slurm.job("404")
        assert slurm.answers()
        fake.refuse = 1
        assert not slurm.answers()

    def test_a_job_is_told_in_full(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """All fields of a job arrive, whatever the user put into its name and command."""
        assert slurm.job("7") == fake.jobs["7"]

    def test_an_array_task_is_one_job(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """A task is found by array and task number, and its requeue does not touch its siblings."""
        assert slurm.job("100_5") == fake.jobs["100_5"]
        slurm.requeue("100_5")
        assert fake.done == [("requeue", "100_5")]

    def test_a_held_job_is_released(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """It alone."""
        slurm.release("7")
        assert fake.done == [("release", "7")]

    def test_an_unknown_job_is_an_error(self, slurm: Slurm) -> None:
        """Whatever goes wrong is a SlurmError."""
        with pytest.raises(SlurmError):
            slurm.job("404")

    def test_requeue_and_update_reach_slurm(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """Start time and excluded nodes can be set together and alone."""
        slurm.requeue("7")
        slurm.update("7", start_time="now+3", exclude=["n2", "n9"])
        slurm.update("7", start_time="now")
        assert fake.done == [("requeue", "7"), ("update", "7", "now+3", ("n2", "n9")), ("update", "7", "now", None)]

    def test_nodes_are_told(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """State, reason, address and port, for one node and for many; unknown ones are left out."""
        assert slurm.node("n2") == fake.known["n2"]
        assert slurm.nodes(["n1", "n2"]) == fake.known
        assert slurm.nodes(["n2", "nowhere"]) == {"n2": fake.known["n2"]}
        with pytest.raises(SlurmError):
            slurm.node("nowhere")
        assert slurm.node("n2").sick
        assert not slurm.node("n1").sick

    def test_a_step_is_found_by_its_srun_and_signalled(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """The step that one's own srun started is found and gets the signal."""
        assert slurm.step_of("7", 4242) == "3"
        assert slurm.step_of("7", 1) == ""
        assert slurm.running_steps("7") == ("3",), "the batch script's is none"
        slurm.cancel_step("7", "3", "TERM")
        assert fake.done == [("cancel", "7", "3", "TERM")]


class TestFake(Contract):
    """The fake keeps the contract."""

    @pytest.fixture
    def slurm(self, fake: FakeSlurm) -> Slurm:
        return fake


class TestScontrol(Contract):
    """Slurm's commands keep the contract."""

    @pytest.fixture
    def slurm(self, fake: FakeSlurm) -> Slurm:
        return ScontrolSlurm(Scontrol(fake))

    def test_a_partitions_nodes_are_told(self, slurm: Slurm, fake: FakeSlurm) -> None:
        """In full, as names."""
        fake.partitions["main"] = ("n1", "n2")
        assert slurm.partition_nodes("main") == ("n1", "n2")


class TestPyslurm(Contract):
    """pyslurm keeps the contract."""

    @pytest.fixture
    def slurm(self, fake: FakeSlurm) -> Slurm:
        return PyslurmSlurm(pyslurm(fake))


def test_pyslurm_does_not_requeue_a_whole_array_for_one_task() -> None:
    """The last task of an array has the array's own number; requeuing that would requeue all of it."""
    fake = FakeSlurm({"100_9": JobInfo("100", "RUNNING", array_job="100", array_task="9")}, [])
    with pytest.raises(SlurmError, match="without the rest"):
        PyslurmSlurm(pyslurm(fake)).requeue("100_9")
    assert fake.done == []


@pytest.mark.parametrize("job", ["", "1 2", "7;id", "-w", "7_", "7_1_2", "٣", "99999999999"])
def test_what_is_no_job_id_reaches_no_command(job: str) -> None:
    """Ids are checked before they reach a command line."""
    slurm = ScontrolSlurm(lambda command, patience: pytest.fail(f"ran {command}"))
    for ask in (slurm.job, slurm.requeue, lambda j: slurm.update(j, start_time="now")):
        with pytest.raises(SlurmError):
            ask(job)


def test_a_node_name_cannot_smuggle_another_setting() -> None:
    """A user's node name cannot end the list and set something else."""
    slurm = ScontrolSlurm(lambda command, patience: pytest.fail(f"ran {command}"))
    with pytest.raises(SlurmError):
        slurm.update("7", exclude=["n1 Priority=1"])


@pytest.mark.parametrize("reason", ["", "a\nState=RESUME", 'say "x"', "x=y", "State=\\", "ß"])
def test_a_reason_cannot_smuggle_another_setting(reason: str) -> None:
    """What could end the reason, or begin another setting, reaches no command; node names are checked too."""
    slurm = ScontrolSlurm(lambda command, patience: pytest.fail(f"ran {command}"))
    with pytest.raises(SlurmError):
        slurm.drain("n1", reason)
    with pytest.raises(SlurmError):
        slurm.drain("ALL State=RESUME", "fine")


@pytest.mark.parametrize("text", ["", "NodeName=other Arch=x\n   State=IDLE\n"])
def test_silence_about_a_node_is_an_error(text: str) -> None:
    """And one that the hooks expect: with another kind a prolog would let a job start on a bad node."""
    slurm = ScontrolSlurm(lambda command, patience: text)
    with pytest.raises(SlurmError, match="n1"):
        slurm.node("n1")


def test_the_users_environment_does_not_lead_a_command_astray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's number would be looked up, or cancelled, on another cluster, or its batch script alone be signalled."""
    for name in ("SLURM_CLUSTERS", "SCANCEL_BATCH", "SCONTROL_FEDERATION", "SLURM_CONF"):
        monkeypatch.setenv(name, "given")
    said = run_command(["env"], 10.0).splitlines()
    assert [line for line in said if line.endswith("=given")] == ["SLURM_CONF=given"]
    assert {"LC_ALL=C", "SLURM_TIME_FORMAT=%s"} <= set(said)


def test_a_command_has_a_deadline_and_its_errors_are_told() -> None:
    """A command that hangs, fails or is missing is a SlurmError with its name in it."""
    with pytest.raises(SlurmError, match=r"no answer within 0\.2 s"):
        run_command(["sleep", "5"], 0.2)
    with pytest.raises(SlurmError, match="no-such-program is not installed"):
        run_command(["no-such-program"], 1.0)
    with pytest.raises(SlurmError, match="false"):
        run_command(["false"], 5.0)
