"""What jit-srun tells the user: one line a thing, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def say(text: str) -> None:
    """Tell the user one thing in one line."""
    sys.stderr.write(f"jit-srun: {' '.join(text.split())}\n")
    sys.stderr.flush()


def told(event: Mapping[str, Any]) -> str:
    """Say a notice in one line; "" for those that are no news."""
    match event.get("event"):
        case "started":
            restored = f", restored from {event['restored']}" if event.get("restored") else ""
            return f"training begins at minibatch {event.get('minibatch')}{restored}"
        case "fault":
            fault = event.get("fault")
            return f"fault: {fault.get('kind')}: {fault.get('detail')}" if isinstance(fault, dict) else "fault"
        case "committed":
            return f"saved: minibatch {event.get('minibatch')} in {event.get('directory')}"
        case "lost":
            return f"not saved: {event.get('reason')} {event.get('error') or ''}"
    return ""


def names(nodes: Sequence[str]) -> str:
    """Name nodes, at most a few of many."""
    return ",".join(nodes) if len(nodes) <= 8 else f"{nodes[0]},{nodes[1]},...,{nodes[-1]} ({len(nodes)} nodes)"
