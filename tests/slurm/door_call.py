"""One question to Slurm through one of the doors, on a host of the cluster: `door_call.py KIND METHOD JSON`.

Prints {"value": ...} or {"error": ...} as JSON; KIND is "scontrol" or "pyslurm".
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from slurm_plugin.slurm import ScontrolSlurm
from slurm_plugin.slurm_native import PyslurmSlurm, load
from slurm_plugin.slurm_text import SlurmError


def main(kind: str, method: str, arguments: str) -> dict[str, Any]:
    """Ask and return the answer."""
    args, named = json.loads(arguments)
    try:
        door = ScontrolSlurm() if kind == "scontrol" else PyslurmSlurm(load())
        value = getattr(door, method)(*args, **named)
    except SlurmError as error:
        return {"error": str(error)}
    if isinstance(value, dict):
        return {"value": {name: dataclasses.asdict(node) for name, node in value.items()}}
    return {"value": dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value}  # type: ignore[arg-type]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
