"""Find network links that were up on this node and are down now, from sysfs: InfiniBand and Ethernet.

Rule 1: which ports have a cable nobody tells us; so a link is missed only once it was seen up since the node booted.
Rule 2: a port that was switched off on purpose, or taken out of the machine, is not missed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from slurm_plugin.evidence import BAD, Finding

CHECK: Final = "links"
FILE: Final = "links"  # in the spool: the boot's id, then the links that were seen up, one a line
CLASS: Final = "/sys/class"
UP, DOWN, OFF = "up", "down", "off"
_IFF_UP: Final = 1  # of /sys/class/net/*/flags: an administrator wants it up


def compare(known: frozenset[str], now: Mapping[str, str]) -> tuple[list[Finding], frozenset[str]]:
    """Return the known links that are down, and the links that are known from now on."""
    down = sorted(name for name in known if now.get(name) == DOWN)
    kept = {name for name in known if now.get(name) in (UP, DOWN)}
    seen = {name for name, state in now.items() if state == UP}
    return [Finding(CHECK, BAD, f"link {name} was up and is down") for name in down], frozenset(kept | seen)


def infiniband(state: str, physical: str) -> str:
    """Read a port's `state` ("4: ACTIVE") and `phys_state` ("5: LinkUp")."""
    if state.startswith("4:"):
        return UP
    return OFF if physical.startswith("3:") else DOWN  # 3: Disabled


def ethernet(flags: str, carrier: str) -> str:
    """Read an interface's `flags` ("0x1003") and `carrier` ("1"; it cannot be read while the interface is off)."""
    try:
        wanted = int(flags, 16) & _IFF_UP
    except ValueError:
        return OFF
    if not wanted:
        return OFF
    return UP if carrier == "1" else DOWN


def read(root: str = CLASS) -> dict[str, str]:
    """Read the state of every port of real hardware: "mlx5_0/1" or "eno1" -> UP, DOWN or OFF."""
    found = {}
    for device in _names(f"{root}/infiniband"):
        for port in _names(f"{root}/infiniband/{device}/ports"):
            folder = f"{root}/infiniband/{device}/ports/{port}"
            found[f"{device}/{port}"] = infiniband(_text(f"{folder}/state"), _text(f"{folder}/phys_state"))
    for name in _names(f"{root}/net"):
        if os.path.exists(f"{root}/net/{name}/device"):  # bridges, bonds and the like have none
            found[name] = ethernet(_text(f"{root}/net/{name}/flags"), _text(f"{root}/net/{name}/carrier"))
    return found


def parse_known(text: bytes, boot: str) -> frozenset[str]:
    """Read the links that were seen up in this boot; none from another one."""
    first, *names = text.decode("ascii", "replace").splitlines() or [""]
    return frozenset(filter(None, names)) if first == boot else frozenset()


def write_known(known: frozenset[str], boot: str) -> bytes:
    """Write them so that `parse_known` reads the same."""
    return "".join(f"{line}\n" for line in (boot, *sorted(known))).encode("ascii", "replace")


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
