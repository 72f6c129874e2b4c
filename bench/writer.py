"""One of the processes that `bench.save` measures: told what to do on standard input, answers on standard output.

    "save 3", "plain 3", "torch 3"  ->  {"begin", "end": monotonic seconds, "bytes", ...}   all end durable on the disk

Rule: all three write this process's share of the same state; only the writing is inside `begin` and `end`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from bench.state import infos, plan
from jitmpi import save, store
from jitmpi.device import HostReader


class Writer:
    """A state and three ways to write a share of it into `folder`."""

    def __init__(self, folder: str, rank: int, savers: int) -> None:
        self.folder, self.rank, self.savers = folder, rank, savers
        self.infos = infos()
        random = torch.Generator().manual_seed(1)
        self.tensors = [torch.rand(info.shape, generator=random) for info in self.infos]
        share = save.divide(self.infos, range(savers))[rank]
        # torch.save writes the whole storage behind a slice, so it gets slices of their own
        self.own = {f"{self.infos[i].name}[{a}:{b}]": self.tensors[i][a:b].clone() for i, a, b in share}
        self.reader = HostReader()

    def save(self, turn: int) -> dict[str, Any]:
        """Write as jitmpi does: laid out as HDF5, checksummed, fsynced, renamed."""
        written = save.save(
            plan(self.folder, self.savers, turn), rank=self.rank, tensors=self.infos,
            read=lambda index, start, stop: self.reader.read(self.tensors[index], start, stop),
            deadline=time.monotonic() + 300,
        )  # fmt: skip
        return {"bytes": written.nbytes, "written": asdict(written)}

    def plain(self, turn: int) -> dict[str, Any]:
        """Write the same bytes with write(2) and fsync(2) and nothing else."""
        fd = os.open(self._path("plain", turn), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        total = 0
        try:
            for tensor in self.own.values():
                data = self.reader.read(tensor, 0, len(tensor))
                while data:
                    done = os.write(fd, data[: save.CHUNK])
                    data, total = data[done:], total + done
            os.fsync(fd)
        finally:
            os.close(fd)
        return {"bytes": total}

    def torch(self, turn: int) -> dict[str, Any]:
        """Write with torch.save and fsync(2)."""
        with open(self._path("torch", turn), "xb") as file:
            torch.save(self.own, file)
            file.flush()
            os.fsync(file.fileno())
            return {"bytes": file.tell()}

    def _path(self, kind: str, turn: int) -> str:
        return os.path.join(self.folder, f"{kind}-{turn}-{self.rank}")


def main() -> None:
    """Serve the lines of standard input until its end."""
    folder, rank, savers = sys.argv[1:]
    torch.set_num_threads(1)
    writer = Writer(folder, int(rank), int(savers))
    ways: dict[str, Callable[[int], dict[str, Any]]] = {k: getattr(writer, k) for k in ("save", "plain", "torch")}
    store.Image().close()  # HDF5 is loaded, as it is in a rank by the time of a fault
    print("ready", flush=True)
    for line in sys.stdin:
        way, turn = line.split()
        begin = time.monotonic()
        answer = ways[way](int(turn))
        print(json.dumps({"begin": begin, "end": time.monotonic(), **answer}), flush=True)


if __name__ == "__main__":
    main()
