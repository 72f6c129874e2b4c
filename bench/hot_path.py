"""Measure what a minibatch pays for protection, on 1 and on 4 ranks, for a model and one ten times larger.

The ranks are processes of this machine with the real control plane and agent threads between them, over TCP on its own
address, each with a node name of its own so that it hands its context to the others. Worlds take turns.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.children import REPO, started, wait
from bench.rows import Row, differences, row
from slurm_plugin import contract

WIDTHS: Final = {"1M": 256, "10M": 810}  # of 16 square layers: 1.05 and 10.5 million parameters
RANKS: Final = (1, 4)
TARGET_US: Final = 100.0
DROP: Final = ("SLURM_", "SLURMD_", "SPANK_", "JIT_CKPT", "PMIX_", "PMI_", "OMPI_")
MICRO: Final = 1e6
TIMEOUT: Final = 180.0  # seconds for one world; start and measurement take about fifteen on two idle cores

Found = list[dict[str, Any]]  # of every rank


def measure(say: Callable[[str], None], quick: bool) -> list[Row]:
    """Return the rows of the group."""
    turns = 1 if quick else 2
    spans: dict[tuple[str, int], Found] = {(model, ranks): [] for ranks in RANKS for model in WIDTHS}
    tiny: dict[int, Found] = {ranks: [] for ranks in RANKS}
    for turn in range(turns):
        for model, ranks in spans:
            count = 100 if quick else {"1M": 300, "10M": 100}[model]
            spans[model, ranks] += _world(ranks, "spans", f"--width={WIDTHS[model]}", f"--minibatches={count}")
        for ranks in RANKS:
            tiny[ranks] += _world(ranks, "tiny", f"--minibatches={2000 if quick else 6000}")
        say(f"hot_path: turn {turn + 1} of {turns}")
    return [r for key, found in spans.items() for r in _span_rows(*key, found)] + [
        r for ranks, found in tiny.items() for r in _tiny_rows(ranks, found)
    ]


def _span_rows(model: str, ranks: int, found: Found) -> list[Row]:
    where = f"{model}.{ranks}"
    added = [MICRO * span for rank in found for span in rank["spans"]]
    return [
        row(f"hot_path_us.{where}", "us", added, target=TARGET_US),
        row(f"hot_path_cpu_us.{where}", "us", [MICRO * cpu for rank in found for cpu in rank["cpu"]]),
        row(f"agent_cpu_us.{where}", "us", [MICRO * rank["agent_cpu"] for rank in found]),
        row(f"handed_over_bytes.{where}", "bytes", [rank["handed_over"] for rank in found]),
        row(f"model_bytes_copied.{where}", "bytes", [rank["copied"] for rank in found], target=0.0),
    ]


def _tiny_rows(ranks: int, found: Found) -> list[Row]:
    def added(suffix: str) -> list[float]:
        pairs = ((rank[f"protected{suffix}"], rank[f"plain{suffix}"]) for rank in found)
        return [MICRO * value for these, those in pairs for value in differences(these, those)]

    plain = [MICRO * value for rank in found for value in rank["plain"]]
    return [
        row(f"tiny_loop_us.without.{ranks}", "us", plain),
        row(f"tiny_loop_us.added.{ranks}", "us", added("")),
        row(f"tiny_loop_us.added_cpu.{ranks}", "us", added("_cpu")),
    ]


def _world(ranks: int, kind: str, *options: str) -> Found:
    """Run one world to its end and return what every rank found."""
    (REPO / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-hot-", dir=REPO / "build"))
    try:
        line = [sys.executable, str(REPO / "bench" / "ranks" / "loop.py"), kind, str(folder), *options]
        port = _free_port()
        environs = [environment(dict(os.environ), rank, ranks, str(folder), port) for rank in range(ranks)]
        with (
            open(folder / "log", "w", encoding="utf-8") as log,
            started([line] * ranks, environs, log) as children,
        ):
            wait(children, TIMEOUT, log)
        return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(base: dict[str, str], rank: int, ranks: int, folder: str, port: int) -> dict[str, str]:
    """Return what Slurm and the plugin would give to a rank that is alone on its node, started without MPI."""
    kept = {k: v for k, v in base.items() if not k.startswith(DROP)}
    return kept | {
        contract.ENV_OPTIONS: f"dir={folder},hang=off",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(ranks),
        "SLURMD_NODENAME": f"n{rank}",
        "SLURM_MPI_TYPE": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
