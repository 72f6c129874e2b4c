"""A node in a folder, for the tests of its hooks: spool, kernel log, tools, site checks, and a Slurm in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_plugin.occasion import Occasion
from slurm_plugin.site import Site
from slurm_plugin.slurm_text import NodeInfo
from slurm_plugin.spool import Spool
from tests.unit.fake_slurm import FakeSlurm


class Node:
    """One healthy node "n1".

    Attributes:
        log: the lines that its hooks wrote; asked: how often the door to Slurm was opened.
        slurm: where the node may be drained.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.asked = 0
        self.slurm = FakeSlurm({}, [NodeInfo("n1", "IDLE", "", "n1", 6818)])
        self.spool = Spool(str(folder / "spool"), os.geteuid())
        (folder / "checks.d").mkdir(mode=0o755)
        (folder / "bin").mkdir()
        (folder / "slurm.conf").write_text("NodeName=n[1-4] Gres=gpu:2\n")
        self._open: list[int] = []
        self._records: list[bytes] = []

    def site(self, **changes: Any) -> Site:
        """The site's settings, with a patience that suits tests."""
        return replace(Site(checks_dir=str(self.folder / "checks.d"), check_patience=10.0, spool_free=0), **changes)

    def occasion(self, hook: str, job: str = "17", **changes: Any) -> Occasion:
        """One run of a hook for a job of user 1000; `changes` are those of the site."""
        environ = {"SLURM_JOB_ID": job, "SLURM_JOB_UID": "1000", "SLURM_CONF": str(self.folder / "slurm.conf")}
        given: dict[str, Any] = {
            "kmsg": self._kmsg(), "tools": str(self.folder / "bin"), "sysfs": str(self.folder / "sys"),
            "nvidia_caps": "/no/such/folder", "owner": os.geteuid(),
        }  # fmt: skip
        return Occasion(hook, "n1", self.site(**changes), self.log.append, self._door, job, "1000" if job else "",
                        environ, self.spool, given)  # fmt: skip

    def drained(self) -> list[str]:
        """The reasons for which the node was drained."""
        return [str(done[2]) for done in self.slurm.done if done[0] == "drain"]

    def kernel(self, *texts: str) -> None:
        """Let the kernel write."""
        for text in texts:
            number = len(self._records) + 1
            self._records.append(f"4,{number},{number}000,-;{text}\n".encode())

    def program(self, name: str, text: str, folder: str = "checks.d") -> None:
        """Install a program."""
        path = self.folder / folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def tasks(self, *lines: str, job: str = "17") -> None:
        """Let the plugin note how tasks of a job ended."""
        self.spool.write(f"{job}/tasks", "".join(f"{line}\n" for line in lines).encode())

    def jobs(self) -> list[str]:
        """The jobs that have a folder in the spool."""
        return sorted(p.name for p in (self.folder / "spool").iterdir() if p.is_dir())

    def _door(self) -> FakeSlurm:
        self.asked += 1
        return self.slurm

    def _kmsg(self) -> str:
        """A log as /dev/kmsg gives it, one record a read; it can be read once."""
        reader, writer = os.pipe2(os.O_DIRECT)
        for record in self._records:
            os.write(writer, record)
        os.close(writer)
        self._open.append(reader)
        return f"/proc/self/fd/{reader}"

    def close(self) -> None:
        """Close what is open."""
        for file in self._open:
            os.close(file)
        self.spool.close()
