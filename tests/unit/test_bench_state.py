from __future__ import annotations

from bench import hot_path, state
from jitmpi import config, save


def test_the_written_state_is_a_real_models() -> None:
    """About 300 MB in many tensors, large and small, and three savers share them evenly."""
    infos = state.infos()
    total = sum(info.nbytes for info in infos)
    assert 290e6 < total < 310e6
    assert len({info.name for info in infos}) == len(infos)
    shares = save.divide(infos, range(3))
    widths = [
        sum((stop - start) * infos[i].nbytes // infos[i].shape[0] for i, start, stop in s) for s in shares.values()
    ]
    assert sum(widths) == total
    assert max(widths) - min(widths) < 10_000


def test_a_measured_rank_has_what_slurm_would_give_it() -> None:
    """Each rank alone on its node, in one world of the right size, and nothing of a surrounding job."""
    base = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "9",
        "PMIX_RANK": "3",
        "JIT_CKPT_ATTEMPT": "4",
    }
    settings = config.read(hot_path.environment(base, 2, 4, "/somewhere", 4000))
    assert settings is not None
    assert (settings.rank, settings.size, settings.node, settings.mpi_type) == (2, 4, "n2", "none")
    assert (settings.job_id, settings.attempt) == ("1", 0)
    assert settings.options.dir == "/somewhere"
    assert settings.options.hang == 0
