"""round: whoever dies whenever, every survivor leaves, and at most one checkpoint is committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitmpi import round as rounds
from jitmpi.events import Context, Described, Fault, Report, Written
from slurm_plugin.contract import EXIT_COMMITTED, EXIT_LOST


@dataclass
class World:
    """Ranks in one process: messages in a list, time in a number, deaths where the test wants them."""

    size: int
    at: dict[int, int]  # rank -> minibatch it settles at; -1: not intact
    silent: set[int] = field(default_factory=set)  # alive, but never answering
    disk_full: set[int] = field(default_factory=set)
    base: int = -1
    now: float = 0.0

    def __post_init__(self) -> None:
        template = "/d/m{minibatch}-e{epoch}-c{coordinator}"
        self.machines = {
            r: rounds.Round(r, self.size, tuple(range(min(4, self.size))), 30.0, 100.0, template, self.base)
            for r in range(self.size)
        }
        self.alive = set(range(self.size))
        self.inbox: list[tuple[int, int, str, object]] = []  # sender, receiver, kind, value
        self.later: list[tuple[int, object]] = []  # rank, Write or Commit under way
        self.codes: dict[int, int] = {}
        self.commits: list[rounds.Commit] = []
        self.announced: list[rounds.Announce] = []
        self.concluded: list[rounds.Conclude] = []

    def die(self, rank: int) -> None:
        self.alive.discard(rank)
        for other in sorted(self.alive):
            fault = Fault("death", (rank,), (), self.at[other], f"rank {rank}", self.now)
            self.machines[other].on_gone(fault, self.now)
            self.collect(other)

    def collect(self, rank: int) -> None:
        if rank not in self.alive:
            return
        for action in self.machines[rank].take():
            match action:
                case rounds.Tell(None, kind, value):
                    self.inbox += [(rank, other, kind, value) for other in range(self.size) if other != rank]
                case rounds.Tell(other, kind, value):
                    self.inbox.append((rank, other, kind, value))  # type: ignore[arg-type]
                case rounds.Settle() if rank not in self.silent:
                    self.machines[rank].settled(self.report(rank), self.now, self.now)
                    self.collect(rank)
                case rounds.Write() | rounds.Commit():
                    self.later.append((rank, action))
                case rounds.Conclude():
                    assert rank not in self.codes, "the job is seen to before anybody leaves"
                    self.concluded.append(action)
                case rounds.Announce():
                    self.announced.append(action)
                case rounds.Leave(code):
                    self.codes[rank] = code
                    self.alive.discard(rank)

    def report(self, rank: int) -> Report:
        m = self.at[rank]
        contexts = tuple(Context(r, k, True, {}) for r in range(self.size) for k in range(12))
        return Report(rank, m, m >= 0, 0, (), contexts, "", "between")

    def deliver(self, index: int) -> None:
        pair = self.inbox[index][:2]
        first = next(i for i, message in enumerate(self.inbox) if message[:2] == pair)  # TCP keeps a pair's order
        sender, receiver, kind, value = self.inbox.pop(first)
        if receiver not in self.alive or receiver in self.silent:
            return
        machine, now = self.machines[receiver], self.now
        match kind:
            case "fault":
                machine.on_fault(sender, value, now)  # type: ignore[arg-type]
            case "report":
                machine.on_report(value, now)  # type: ignore[arg-type]
            case "plan":
                machine.on_plan(value, now)  # type: ignore[arg-type]
            case "written":
                machine.on_written(value, now, now)  # type: ignore[arg-type]
            case "described":
                machine.on_described(value)  # type: ignore[arg-type]
            case "failed":
                machine.on_failed(sender, value["epoch"], value["reason"], now)  # type: ignore[index]
            case "committed":
                machine.on_committed(value["directory"])  # type: ignore[index]
            case "abort":
                machine.on_abort(value["reason"])  # type: ignore[index]
        self.collect(receiver)

    def work(self, index: int) -> None:
        rank, action = self.later.pop(index)
        if rank not in self.alive:
            return
        machine = self.machines[rank]
        if isinstance(action, rounds.Commit):
            if self.commits:
                machine.commit_failed("claimed", True)
            else:
                self.commits.append(action)
                machine.committed(action.plan.directory)
        elif isinstance(action, rounds.Write):
            if rank in self.disk_full:
                machine.failed(action.plan.epoch, "no space", self.now)
            else:
                plan = action.plan
                savers = plan.savers[0]
                first = rank == savers[0] and plan.coordinator not in savers
                described = Described(plan.epoch, (), b"%d" % self.at[rank]) if first else None
                machine.saved(Written(rank, plan.epoch, f"rank{rank}.h5", 1, ()), self.now, self.now, described)
        self.collect(rank)

    def run(self, choose: object = None) -> None:
        """Deliver everything, in the order that `choose` (a list of numbers) says, moving time when all is quiet."""
        order = iter(choose or [])  # type: ignore[call-overload]
        for _ in range(5000):
            todo = len(self.inbox) + len(self.later)
            if todo:
                index = next(order, 0) % todo
                if index < len(self.inbox):
                    self.deliver(index)
                else:
                    self.work(index - len(self.inbox))
                continue
            times = [t for r in self.alive - self.silent if (t := self.machines[r].wait_until()) is not None]
            if not times:
                return
            self.now = max(self.now, min(times))
            for rank in sorted(self.alive - self.silent):
                self.machines[rank].tick(self.now)
                self.collect(rank)
        raise AssertionError("the round never ends")


def test_a_death_is_saved_by_the_survivors() -> None:
    """One rank dies; the others write the newest state, one commits, all leave alike."""
    world = World(4, {0: 7, 1: 7, 2: 7, 3: 8})
    world.die(1)
    world.run()
    assert world.codes == dict.fromkeys((0, 2, 3), EXIT_COMMITTED)
    assert [(c.plan.minibatch, c.fault.kind, c.fault.ranks) for c in world.commits] == [(8, "death", (1,))]
    assert [a.phase for a in world.announced] == ["training"]
    assert [c.minibatch for c in world.concluded] == [8]  # the checkpoint's, not the one in which rank 0 saw the fault


def test_a_coordinator_that_is_behind_commits_the_savers_scalars() -> None:
    """Hyper-parameters and schedulers are those of the minibatch that is saved, whoever commits it."""
    world = World(4, {0: 7, 1: 7, 2: 7, 3: 8})
    world.die(1)
    world.run()
    assert world.commits[0].plan.coordinator == 0
    assert world.commits[0].plan.savers == {0: (3,)}
    assert world.commits[0].described is not None
    assert world.commits[0].described.scalars == b"8"


def test_the_death_of_the_coordinator_during_the_save_hands_over() -> None:
    """The next candidate plans again and the state is committed."""
    world = World(4, dict.fromkeys(range(4), 5))
    world.die(3)
    while not any(isinstance(a, rounds.Write) for _, a in world.later):
        world.deliver(0)
    world.die(0)
    world.run()
    assert world.codes == dict.fromkeys((1, 2), EXIT_COMMITTED)
    assert world.commits[0].plan.coordinator == 1
    assert set(world.commits[0].plan.savers[0]) == {1, 2}


def test_a_saver_with_a_full_disk_is_replaced() -> None:
    """The others take its share over."""
    world = World(4, dict.fromkeys(range(4), 5), disk_full={2})
    world.die(1)
    world.run()
    assert world.commits[0].plan.savers == {0: (0, 3)}


def test_full_disks_everywhere_end_with_the_reason() -> None:
    """Nothing is committed, everybody leaves, and the reason names the failure."""
    world = World(3, dict.fromkeys(range(3), 5), disk_full={0, 1, 2})
    world.die(1)
    world.run()
    assert world.codes == dict.fromkeys((0, 2), EXIT_LOST)
    assert not world.commits


def test_a_rank_that_answers_nothing_is_left_behind() -> None:
    """A stopped process cannot hold the others: they go on without it after a deadline."""
    world = World(4, dict.fromkeys(range(4), 5), silent={2})
    world.machines[0].fault(Fault("hang", (), (), 5, "no progress", 0.0), 0.0)
    world.collect(0)
    world.run()
    assert world.codes == dict.fromkeys((0, 1, 3), EXIT_COMMITTED)
    assert (world.commits[0].fault.kind, world.commits[0].fault.ranks) == ("hang", (2,))


def test_a_silent_coordinator_is_replaced() -> None:
    """Rank 0 is stopped: rank 1 takes over."""
    world = World(4, dict.fromkeys(range(4), 5), silent={0})
    world.machines[2].fault(Fault("hang", (), (), 5, "no progress", 0.0), 0.0)
    world.collect(2)
    world.run()
    assert world.codes == dict.fromkeys((1, 2, 3), EXIT_COMMITTED)
    assert world.commits[0].plan.coordinator == 1


def test_nothing_new_is_not_saved_again() -> None:
    """A fault before the first update after a restart leaves the checkpoint that is there."""
    world = World(3, dict.fromkeys(range(3), 5), base=5)
    world.die(2)
    world.run()
    assert world.codes == dict.fromkeys((0, 1), EXIT_LOST)
    assert [a.phase for a in world.announced] == ["starting"]


def test_half_an_update_everywhere_is_not_saved() -> None:
    """No intact holder: abort, and nothing that looks complete."""
    world = World(3, {0: -1, 1: -1, 2: 4})
    world.die(2)
    world.run()
    assert world.codes == dict.fromkeys((0, 1), EXIT_LOST)
    assert not world.commits


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_sides_of_a_cut_the_larger_claims_first(order: int) -> None:
    """The smaller side waits before it claims, and then finds the claim taken."""
    world = World(4, dict.fromkeys(range(4), 5))
    for rank in (1, 2, 3) if order else (3, 2, 1):
        fault = Fault("death", (0,), (0,), 5, "rank 0", 0.0)
        world.machines[rank].on_gone(fault, 0.0)
        world.machines[0].on_gone(Fault("death", (rank,), (rank,), 5, f"rank {rank}", 0.0), 0.0)
    cut = [m for m in world.inbox if 0 not in m[:2]]
    world.inbox = cut
    for rank in range(4):
        world.collect(rank)
        world.inbox = [m for m in world.inbox if 0 not in m[:2]]
    world.run()
    assert set(world.codes.values()) == {EXIT_COMMITTED}
    assert world.commits[0].plan.coordinator == 1


@settings(max_examples=300)
@given(
    st.integers(2, 6),
    st.lists(st.sampled_from([4, 5, 5, 5, -1]), min_size=6, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=4),
    st.sets(st.integers(0, 5), max_size=2),
    st.lists(st.integers(0, 1000), max_size=60),
)
def test_every_survivor_always_leaves(
    size: int, places: list[int], deaths: list[tuple[int, int]], full: set[int], order: list[int]
) -> None:
    """Random deaths at random moments, full disks, any order of messages: no hang, one commit at most, one story."""
    world = World(size, dict(enumerate(places[:size])), disk_full=full)
    clock = 0
    for rank, pause in deaths:
        for _ in range(pause):
            todo = len(world.inbox) + len(world.later)
            if todo:
                index = order[clock % len(order)] % todo if order else 0
                clock += 1
                world.deliver(index) if index < len(world.inbox) else world.work(index - len(world.inbox))
        if rank % size in world.alive:
            world.die(rank % size)
    world.run(order)
    assert not world.alive
    assert len(world.commits) <= 1
    if world.commits:
        savers, described = world.commits[0].plan.savers[0], world.commits[0].described
        assert (described is None) == (world.commits[0].plan.coordinator in savers)
        assert described is None or described.scalars == b"%d" % world.commits[0].plan.minibatch
        assert {w.rank for w in world.commits[0].written} == set(savers)
        assert all(places[r] == world.commits[0].plan.minibatch for r in savers)
    elif size <= 4 and not full:
        assert all(places[r] == -1 for r in world.codes), "an intact survivor was not saved"
