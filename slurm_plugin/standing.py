"""Which of a job's nodes a launch may use: those that answer and that no other training of the script is using.

Rule 1: a node that the ranks saw die is not asked again: that would cost a second each time.
Rule 2: what is asked for within a moment is asked once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Final

from slurm_plugin import hold, notice, trainings
from slurm_plugin.allocation import Site
from slurm_plugin.recovery import Allocation
from slurm_plugin.slurm import Slurm
from slurm_plugin.slurm_text import JobInfo, SlurmError

FRESH: Final = 3.0  # seconds for which an answer of the nodes is good


class Standing:
    """The nodes of one jit-srun.

    Args:
        root: the option's directory; own: the name of this training's directory in it.
    """

    def __init__(self, slurm: Slurm, site: Site, root: str, own: str) -> None:
        self._slurm, self._site, self._root, self._own = slurm, site, root, own
        self._asked: tuple[float, frozenset[str]] = (-FRESH, frozenset())
        self._gone: set[str] = set()

    def answering(self) -> frozenset[str]:
        """Return the nodes that answer."""
        asked, nodes = self._asked
        if time.monotonic() - asked >= FRESH:
            addresses = {n: a for n, a in self._site.addresses.items() if n not in self._gone}
            nodes = notice.answering(addresses) if self._site.addresses else frozenset(self._site.nodes)
            self._asked = (time.monotonic(), nodes)
        return nodes

    def ask_again(self) -> None:
        """Let the next question be a new one."""
        self._asked = (-FRESH, frozenset())

    def lost(self, nodes: Iterable[str]) -> None:
        """Note nodes that the ranks saw die."""
        self._gone.update(nodes)

    def first(self) -> list[str]:
        """Return the nodes of a first launch; fewer than needed when too few answer."""
        free = [n for n in self._site.nodes if n in self.answering()]
        busy = self._busy()
        idle = [n for n in free if n not in busy]
        return (idle if len(idle) >= self._site.need else free)[: self._site.need]

    def allocation(self, job: JobInfo | None, last: Collection[str]) -> Allocation:
        """Return what is left for another launch.

        Args:
            job: what Slurm says of it, if it does.
            last: the nodes of the launch that has ended.
        """
        nodes = job.nodes if job and job.nodes else self._site.nodes
        busy = self._busy().difference(last)
        kept = tuple(n for n in self._site.nodes if n in nodes and n not in busy)
        if 2 * len(self._gone.intersection(last)) > len(last):
            self._gone.clear()  # so many: this node may have been the one that was cut off, and they answer again
            self.ask_again()
        return Allocation(kept, self.answering(), self._site.need, self._drained())

    def _busy(self) -> frozenset[str]:
        """Return the nodes that other trainings of this script use now."""
        others = (t for t in trainings.find(self._root, self._site.job) if t.name != self._own and not t.ended)
        return frozenset(n for t in others if hold.is_held(self._site.job, t.name) for n in t.nodes)

    def _drained(self) -> frozenset[str]:
        """Return the nodes on which Slurm would start no new job."""
        try:
            known = self._slurm.nodes(self._site.nodes)
        except SlurmError:
            return frozenset()  # unknown
        return frozenset(name for name, node in known.items() if node.closed)
