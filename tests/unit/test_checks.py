"""All checks of a node together: what each looks at, and that none can hurt."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_plugin.checks import CHECKS, Look, look
from slurm_plugin.evidence import BAD, NOTE, Finding
from slurm_plugin.site import Site

SMI = "#!/bin/sh\n[ \"$*\" = '-q -d ECC,ROW_REMAPPER' ] || exit 2\necho 'GPU 00000000:17:00.0'\n"
ROCM = "#!/bin/sh\nprintf 'GPU[0]\\t\\t: GUID: 1\\nGPU[1]\\t\\t: GUID: 2\\n'\n"


@pytest.fixture
def here(tmp_path: Path) -> Look:
    """A look at a node that has nothing to look at."""
    (tmp_path / "bin").mkdir()
    site = Site(checks_dir=str(tmp_path / "checks.d"), check_patience=10.0)
    return Look(
        "prolog", "n1", site, environ={"SLURM_CONF": str(tmp_path / "slurm.conf")}, tools=str(tmp_path / "bin"),
        sysfs=str(tmp_path / "sys"), nvidia_caps=str(tmp_path / "caps"), owner=os.geteuid(),
    )  # fmt: skip


def put(path: Path, text: str) -> None:
    """Write a file, or a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def words(at: Look) -> list[str]:
    """What a look finds."""
    return [f.what for f in look(at).findings]


def test_a_node_without_anything_has_nothing_to_check(here: Look) -> None:
    """No tool, no card, no mount, no spool, no check of the site: nothing found, at once."""
    begin = time.monotonic()
    assert look(here).findings == []
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_that_fails_says_nothing_against_the_node(here: Look, name: str) -> None:
    """Whether at its beginning or at its end; the others still run."""
    other = "links" if name == "site" else "site"

    def fail() -> list[Finding]:
        raise ZeroDivisionError

    for broken in (lambda at, deadline: fail(), lambda at, deadline: fail):
        table = {name: broken, other: lambda at, deadline: lambda: [Finding(other, BAD, "fans")]}
        assert {(f.check, f.grade) for f in look(here, table).findings} == {(name, NOTE), (other, BAD)}


def test_gpus_are_counted_against_slurm_conf_and_what_it_includes(here: Look, tmp_path: Path) -> None:
    """Wherever the node's line is; where it cannot be read, by the job's own GPUs."""
    put(tmp_path / "bin/nvidia-smi", SMI)
    assert words(here) == []
    put(tmp_path / "slurm.conf", "ClusterName=x\nInclude nodes/*.conf\n")
    put(tmp_path / "nodes/a.conf", "NodeName=n[1-3] Gres=gpu:h100:8\n")
    assert words(here) == ["1 of 8 GPUs answer"]
    (tmp_path / "slurm.conf").unlink()
    assert words(replace(here, environ={"SLURM_JOB_GPUS": "0,3"})) == ["1 of 4 GPUs answer"]


def test_slices_of_gpus_are_not_counted(here: Look, tmp_path: Path) -> None:
    """With MIG Slurm has more GPUs than nvidia-smi, whatever the site has called them."""
    put(tmp_path / "bin/nvidia-smi", SMI)
    put(tmp_path / "slurm.conf", "NodeName=n1 Gres=gpu:small:7\n")
    for cap in ("nvidia-cap1", "nvidia-cap2"):
        put(tmp_path / "caps" / cap, "")
    assert words(here) == ["1 of 7 GPUs answer"]
    put(tmp_path / "caps/nvidia-cap21", "")
    assert words(here) == []


def test_amd_gpus_are_counted_and_their_counters_read(here: Look, tmp_path: Path) -> None:
    """From rocm-smi and from the driver."""
    put(tmp_path / "bin/rocm-smi", ROCM)
    put(tmp_path / "slurm.conf", "NodeName=n1 Gres=gpu:mi250:2\n")
    put(tmp_path / "sys/class/drm/card1/device/ras/umc_err_count", "ue: 4\nce: 0\n")
    assert words(here) == ["GPU card1/umc: 4 uncorrectable errors"]


def test_everything_runs_side_by_side(here: Look, tmp_path: Path) -> None:
    """Five slow things take as long as one of them, and no longer than the patience."""
    put(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nexec sleep 300\n")
    for name in "abcd":
        put(tmp_path / "checks.d" / name, "#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "checks.d").chmod(0o755)
    begin = time.monotonic()
    found = look(replace(here, site=replace(here.site, check_patience=0.5))).findings
    assert time.monotonic() - begin < 8
    assert [f.grade for f in found] == [NOTE] * 4


@pytest.mark.parametrize(("hook", "patience"), [("health-check", 45.0), ("prolog", 60.0), ("epilog", 60.0)])
def test_a_health_check_ends_before_slurmd_kills_it(here: Look, hook: str, patience: float) -> None:
    """After 60 s: with a patience as long, a file system that hangs would never lead to a verdict."""
    until: list[float] = []
    table = {"mounts": lambda at, deadline: until.append(deadline) or list}
    begin = time.monotonic()
    look(replace(here, hook=hook, site=replace(here.site, check_patience=60.0)), table)
    assert patience <= until[0] - begin < patience + 10
