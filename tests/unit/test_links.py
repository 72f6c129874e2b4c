"""Links: a port that was up and is down is missed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_plugin.evidence import BAD
from slurm_plugin.links import DOWN, OFF, UP, compare, ethernet, infiniband, parse_known, read, write_known


def test_only_links_that_were_up_are_missed() -> None:
    """A port without a cable is nobody's fault, on the first look and ever after."""
    found, known = compare(frozenset(), {"mlx5_0/1": UP, "mlx5_1/1": DOWN, "eno1": UP, "eno2": OFF})
    assert (found, known) == ([], {"mlx5_0/1", "eno1"})
    found, known = compare(known, {"mlx5_0/1": DOWN, "mlx5_1/1": DOWN, "eno1": UP, "eno2": DOWN})
    assert [(f.grade, f.what) for f in found] == [(BAD, "link mlx5_0/1 was up and is down")]
    assert known == {"mlx5_0/1", "eno1"}  # it stays missed until it is up again


def test_what_was_switched_off_or_taken_out_is_not_missed() -> None:
    """An administrator did that; once it is up again it counts again."""
    found, known = compare(frozenset({"eno1", "eno2", "eno3"}), {"eno1": OFF, "eno3": UP})
    assert (found, known) == ([], {"eno3"})


@pytest.mark.parametrize(
    ("state", "physical", "told"),
    [
        ("4: ACTIVE", "5: LinkUp", UP),
        ("1: DOWN", "2: Polling", DOWN),
        ("1: DOWN", "3: Disabled", OFF),
        ("2: INIT", "5: LinkUp", DOWN),  # no subnet manager: nothing gets through
        ("", "", DOWN),
    ],
)
def test_infiniband_states(state: str, physical: str, told: str) -> None:
    """As /sys/class/infiniband/*/ports/*/ has them."""
    assert infiniband(state, physical) == told


@pytest.mark.parametrize(
    ("flags", "carrier", "told"),
    [("0x1003", "1", UP), ("0x1003", "0", DOWN), ("0x1002", "", OFF), ("0x1003", "", DOWN), ("", "", OFF)],
)
def test_ethernet_states(flags: str, carrier: str, told: str) -> None:
    """As /sys/class/net/*/ has them."""
    assert ethernet(flags, carrier) == told


def test_ports_of_real_hardware_are_read(tmp_path: Path) -> None:
    """Bridges, bonds and virtual cards have no device behind them and are left out."""
    files = {
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
        "net/eno1/flags": "0x1003",
        "net/eno1/carrier": "0",
        "net/eno1/device/vendor": "0x15b3",
        "net/docker0/flags": "0x1003",
        "net/docker0/carrier": "0",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert read(str(tmp_path)) == {"mlx5_0/1": UP, "eno1": DOWN}
    assert read(str(tmp_path / "none")) == {}


def test_links_are_remembered_until_the_next_boot() -> None:
    """After a boot the node begins anew; a damaged file too."""
    known = frozenset({"mlx5_0/1", "eno1"})
    assert parse_known(write_known(known, "boot-1"), "boot-1") == known
    assert parse_known(write_known(known, "boot-1"), "boot-2") == frozenset()
    assert parse_known(b"", "boot-1") == parse_known(b"\xff\xff", "boot-1") == frozenset()
