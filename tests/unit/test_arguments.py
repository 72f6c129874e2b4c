"""jit-srun's command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_plugin.arguments import OURS, ArgumentError, as_spoken, command, foreign, parse


@pytest.mark.parametrize(
    ("line", "nodes", "tasks", "rest"),
    [
        ("--nodes=4 --ntasks-per-node=2 python t.py -N 9", 4, 8, "--ntasks-per-node=2 python t.py -N 9"),
        ("-N4 x", 4, 4, "x"),
        ("-N 4 -n 6 x", 4, 6, "x"),
        ("-lN4 x", 4, 4, "-l x"),
        ("-n 8 --ntasks-per-node 4 x", 2, 8, "--ntasks-per-node 4 x"),
        ("-n 8 x", 0, 8, "x"),
        ("x -N4", 0, 0, "x -N4"),
        ("--kill-on-bad-exit --mpi pmix -K x", 0, 0, "--kill-on-bad-exit --mpi pmix -K x"),
        ("-N2 -c 4 x", 2, 0, "-c 4 x"),
        ("-N2 -- x --nodes=3", 2, 2, "x --nodes=3"),
        ("--new-option=1 -N2 x", 2, 2, "--new-option=1 x"),
        ("-N 2-2 x", 2, 2, "x"),
        ("--container-remap-root x", 0, 0, "--container-remap-root x"),
        ("--wait-for-children -N 2 --oom-kill-step x", 2, 2, "--wait-for-children --oom-kill-step x"),
    ],
)
def test_nodes_and_tasks_are_understood_and_the_rest_passes(line: str, nodes: int, tasks: int, rest: str) -> None:
    """Only what decides the nodes is taken out; nothing behind the program is read."""
    request = parse(line.split(), {})
    assert (request.nodes, request.tasks, " ".join(request.rest)) == (nodes, tasks, rest)


def test_tasks_a_node_come_from_the_job_where_the_line_is_silent() -> None:
    """Five nodes with 40 tasks are 32 tasks on four of them."""
    assert parse(["-N4", "x"], {"SLURM_NTASKS_PER_NODE": "2"}).tasks == 8
    assert parse(["-N4", "x"], {"SLURM_NTASKS": "40", "SLURM_JOB_NUM_NODES": "5"}).tasks == 32
    assert parse(["-N4", "x"], {"SLURM_NTASKS": "41", "SLURM_JOB_NUM_NODES": "5"}).tasks == 4


@pytest.mark.parametrize(
    ("line", "nodes", "tasks"),
    [("x", 4, 32), ("-n 12 x", 4, 12), ("-N5 x", 5, 40), ("-n 8 --ntasks-per-node=4 x", 2, 8), ("-c 2 x", 4, 0)],
)
def test_spares_count_where_the_line_is_silent(line: str, nodes: int, tasks: int) -> None:
    """spares=1 of five nodes leaves four to the ranks, unless the command line says how many they need."""
    request = parse(
        line.split(), {"SLURM_NTASKS": "40", "SLURM_JOB_NUM_NODES": "5", "SLURM_JOB_NODELIST": "n[1-5]"}, spares=1
    )
    assert (request.nodes, request.tasks) == (nodes, tasks)


def test_spares_leave_a_node_to_the_ranks() -> None:
    """As many spare nodes as the job has: said, not started."""
    with pytest.raises(ArgumentError, match="spares=2: the job has 2 nodes"):
        parse(["x"], {"SLURM_JOB_NODELIST": "n[1-2]"}, spares=2)


def test_wishes_for_nodes_are_read() -> None:
    """-w and -x restrict the choice; jit-srun chooses, so srun does not get them."""
    request = parse(["-w", "n[1-3]", "--exclude=n2", "x"], {})
    assert (request.within, request.without, request.rest) == (("n1", "n2", "n3"), ("n2",), ("x",))


@pytest.mark.parametrize("line", ["", "-N 2", "-N2-4 x", "-N x y", "-w /etc/nodes x", "-n -1 x", "-N"])
def test_what_is_not_fixed_is_refused(line: str) -> None:
    """A range of nodes, a file of nodes, no program: said, not guessed."""
    with pytest.raises(ArgumentError):
        parse(line.split(), {})


@pytest.mark.parametrize(
    ("given_export", "environ", "passed"),
    [
        ([], {}, []),
        (["--export=NONE"], {}, ["--export=A,B"]),
        (["--export", "ALL"], {}, ["--export=ALL,A,B"]),
        (["--export=X=1,Y"], {}, ["--export=X=1,Y,A,B"]),
        ([], {"SLURM_EXPORT_ENV": "NONE"}, ["--export=A,B"]),
    ],
)
def test_our_variables_reach_the_ranks(given_export: list[str], environ: dict[str, str], passed: list[str]) -> None:
    """Whatever --export or `sbatch --export=NONE` say."""
    line = command(parse([*given_export, "x"], environ), ["n1"], ["A", "B"])
    assert [w for w in line if w.startswith("--export")] == passed


def test_srun_gets_the_chosen_nodes_first() -> None:
    """Ours come before the user's options, the program stays last."""
    line = command(parse(["-N2", "--mpi=none", "x", "y"], {}), ["n1", "n3"], [])
    assert line == ["srun", *OURS, "-N", "2", "-w", "n1,n3", "-n", "2", "--mpi=none", "x", "y"]


def test_a_line_is_left_as_the_user_wrote_it() -> None:
    """Nothing is taken out but --export, and nothing added unless nodes are kept aside or lost."""
    assert as_spoken(parse(["-N2", "-w", "n1,n2", "x", "-n"], {}), False, [], []) == [
        "srun",
        "-N2",
        "-w",
        "n1,n2",
        "x",
        "-n",
    ]
    assert as_spoken(parse(["-l", "--", "-x"], {}), False, [], []) == ["srun", "-l", "--", "-x"]
    jobs = {"SLURM_JOB_NODELIST": "n[1-5]", "SLURM_NTASKS": "10", "SLURM_JOB_NUM_NODES": "5"}
    line = as_spoken(parse(["-l", "x"], jobs, spares=1), True, ["n3"], [])
    assert line == ["srun", "--overlap", "-x", "n3", "-N", "4", "-n", "8", "-l", "x"]
    line = as_spoken(parse(["-x", "n1", "x"], jobs), False, ["n3"], [])
    assert line == ["srun", "--overlap", "-x", "n1", "x"]


@pytest.mark.parametrize("line", ["--pty sh", "-h", "-Z x", "--jobid=8 x", "-j 8 x", "--het-group=0 x", "a : b"])
def test_lines_that_cannot_be_started_again(line: str) -> None:
    """A terminal, no step of this job, more than one component."""
    assert foreign(line.split(), {"SLURM_JOB_ID": "7"})


def test_lines_that_can() -> None:
    """What stands behind the program is its own; this job may be named."""
    assert not foreign(["-l", "--jobid=7", "prog", "--pty", "-h"], {"SLURM_JOB_ID": "7"})
    assert foreign(["x"], {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"})


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_line_is_read_or_refused(words: list[str]) -> None:
    """No words raise anything but ArgumentError, and the program's words are never lost."""
    try:
        request = parse([*words, "--", "prog", "-N7"], {})
    except ArgumentError:
        return
    assert request.rest[-2:] == ("prog", "-N7")
