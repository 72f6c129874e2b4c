"""Mark this node in Slurm: drain it with a reason, if nobody has taken it out of service before.

Rule 1: a node that is drained, down or failing already is left exactly as it is, whoever did that and why.
Rule 2: nothing here ever puts a node back into service.
"""

from __future__ import annotations

from slurm_plugin.slurm import Slurm


def mark(slurm: Slurm, node: str, reason: str) -> str:
    """Drain a node and return what was done.

    Raises:
        SlurmError: Slurm refused or did not answer; the node may not be marked.
    """
    seen = slurm.node(node)
    if seen.closed:
        why = f" ({seen.reason})" if seen.reason else ""
        return f"{node} is {seen.state} already{why}; left as it is"
    slurm.drain(node, reason)
    return f"{node} is drained: {reason}"
