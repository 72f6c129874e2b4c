"""Turn a world into the control plane of its ranks: addresses and the job's key go over the world, once."""

from __future__ import annotations

import json
import secrets

from jitmpi import control
from jitmpi.comm import World
from jitmpi.config import Settings
from jitmpi.events import Member


def connect(world: World, settings: Settings, deadline: float) -> tuple[control.ControlPlane, list[Member]]:
    """Link this rank with its peers; collective. `deadline` is of time.monotonic.

    Raises:
        BootstrapError: some are not there in time, or cannot be reached.
    """
    first = json.dumps([settings.node, secrets.token_hex(32)]).encode()
    rows = [json.loads(row) for row in world.exchange(first, deadline)]
    plane = control.ControlPlane(settings.rank, bytes.fromhex(rows[0][1]))
    host = control.own_address(*(str(node) for node, _ in rows if node != settings.node))
    second = json.dumps([host, plane.listen(host)]).encode()
    places = [json.loads(row) for row in world.exchange(second, deadline)]
    members = [Member(rank, str(rows[rank][0]), str(host), int(port)) for rank, (host, port) in enumerate(places)]
    plane.connect(members, deadline)
    return plane, members
