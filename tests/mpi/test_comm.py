"""Every world keeps the same promises: the fake one, the one of files and the one of MPI, alone and with others."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitmpi.comm import FileWorld, World, open_world
from jitmpi.config import Settings, read
from jitmpi.errors import BootstrapError
from slurm_plugin.contract import Options

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # tests are imported by path, so their neighbours need one

import world_contract as contract  # noqa: E402

WAIT = 120.0
SIZES = (1, 4)


class FakeWorld:
    """A world of threads in one process."""

    name = "fake"
    can_broadcast = True
    held = False

    def __init__(self, rank: int, size: int, table: dict[tuple[int, int], bytes]) -> None:
        self.rank, self.size = rank, size
        self._table = table
        self._turn = 0

    def exchange(self, value: bytes, deadline: float) -> list[bytes]:
        turn, self._turn = self._turn, self._turn + 1
        self._table[turn, self.rank] = bytes(value)
        while not all((turn, rank) in self._table for rank in range(self.size)):
            if time.monotonic() > deadline:
                raise BootstrapError("a rank is not there in time")
            time.sleep(0.001)
        return [self._table[turn, rank] for rank in range(self.size)]

    def bcast(self, data: bytearray | memoryview, root: int, deadline: float | None = None) -> None:
        data[:] = self.exchange(bytes(data), deadline or time.monotonic() + WAIT)[root]

    def close(self) -> None:
        pass


Maker = Callable[[int], list[World]]


def run(worlds: list[World], promise: Callable[[World], None]) -> None:
    """Run a promise on every rank, one thread each."""
    errors: list[BaseException] = []

    def work(world: World) -> None:
        try:
            promise(world)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert errors == []


class Contract:
    """The promises; a subclass says how worlds of a size are made."""

    def worlds(self, size: int, folder: Path) -> list[World]:
        raise NotImplementedError

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("promise", contract.KEEPING)
    def test_alone_and_with_others(self, promise: Callable[[World], None], size: int, tmp_path: Path) -> None:
        """A world of one and of several keeps what World promises."""
        run(self.worlds(size, tmp_path), promise)

    @pytest.mark.parametrize("promise", contract.ENDING)
    def test_failures(self, promise: Callable[[World], None], tmp_path: Path) -> None:
        """A rank that is missing ends the waits of the others, at their deadline."""
        run(self.worlds(4, tmp_path), promise)


class TestFakeWorld(Contract):
    """The fake keeps the promises, so tests with it say something about the others."""

    def worlds(self, size: int, folder: Path) -> list[World]:
        table: dict[tuple[int, int], bytes] = {}
        return [FakeWorld(rank, size, table) for rank in range(size)]


class TestFileWorld(Contract):
    """Ranks that meet through files."""

    def worlds(self, size: int, folder: Path) -> list[World]:
        return [FileWorld(rank, size, str(folder / "7" / ".rendezvous-r0-0")) for rank in range(size)]

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        """When all have what they came for, neither files nor the folder remain."""
        run(self.worlds(4, tmp_path), contract.exchanges_in_rank_order)
        assert os.listdir(tmp_path / "7") == []

    def test_only_the_owner_reads(self, tmp_path: Path) -> None:
        """Files and folders that may hold a key are the owner's alone."""
        world = self.worlds(2, tmp_path)[0]
        with pytest.raises(BootstrapError, match=r"1 of 2 ranks left no file .* \(rank\(s\) 1\)"):
            world.exchange(b"key", time.monotonic() + 0.1)
        made = [tmp_path / "7", *(tmp_path / "7").rglob("*")]
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700, 0o600}

    def test_what_dead_launches_left_is_removed(self, tmp_path: Path) -> None:
        """Rank 0 removes rendezvous folders of earlier launches, and nothing else."""
        for name in (".rendezvous-r1-0", ".rendezvous-r2-1", ".rendezvous-rx-0", "m5-r0"):
            (tmp_path / name).mkdir()
        FileWorld(1, 2, str(tmp_path / ".rendezvous-r2-0"))
        FileWorld(0, 2, str(tmp_path / ".rendezvous-r2-0"))
        assert sorted(os.listdir(tmp_path)) == [".rendezvous-r2-1", ".rendezvous-rx-0", "m5-r0"]

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        """Where the ranks cannot meet the error names the folder and the reason."""
        (tmp_path / "file").touch()
        with pytest.raises(BootstrapError, match=r"cannot meet in .*file/7.*: "):
            FileWorld(0, 2, str(tmp_path / "file" / "7")).exchange(b"", time.monotonic() + 1)


def mpiexec(size: int, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("mpiexec")
    if program is None:
        pytest.skip("no mpiexec on this machine")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=WAIT).stdout
    open_mpi = ["--allow-run-as-root", "--oversubscribe"] if "OpenRTE" in version or "Open MPI" in version else []
    # Slurm's variables are for the ranks alone: some mpiexec would look for the job's nodes.
    ranks = ["env", *(f"{key}={value}" for key, value in environ.items()), sys.executable, *arguments]
    return subprocess.run(
        [program, *open_mpi, "-n", str(size), *ranks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )


class TestMpiWorld:
    """Ranks that meet over MPI, each a process of its own."""

    @pytest.mark.parametrize("size", SIZES)
    def test_alone_and_with_others(self, size: int) -> None:
        """MPI keeps what World promises, and ends in an orderly way."""
        done = mpiexec(size, "tests/mpi/world_contract.py", "all")
        assert done.returncode == 0, done.stderr
        assert sorted(re.findall(r"kept (\d+)", done.stdout)) == [str(rank) for rank in range(size)], done.stdout

    @pytest.mark.parametrize("promise", contract.ENDING)
    def test_failures(self, promise: Callable[[World], None]) -> None:
        """A rank that is missing ends the waits of the others, at their deadline."""
        done = mpiexec(4, "tests/mpi/world_contract.py", promise.__name__)
        assert done.stdout.count("kept") == 4, done.stdout + done.stderr


OPEN = """
import sys, time
from jitmpi.comm import open_world
from jitmpi.config import read
settings = read()
world = open_world(settings)
assert "mpi4py" in sys.modules or settings.mpi_type == "none"
assert world.exchange(b"%d" % world.rank, time.monotonic() + 60) == [b"%d" % r for r in range(settings.size)]
world.close()
print(f"opened {world.name}", flush=True)
"""


def environ(size: int, rank: int, folder: Path, **more: str) -> dict[str, str]:
    job = {"JIT_CKPT": f"dir={folder}", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_STEP_ID": "3"}
    return {**job, "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), **more}


def settings(size: int, rank: int, folder: Path, **more: str) -> Settings:
    found = read(environ(size, rank, folder, **more))
    assert found is not None
    return found


def test_a_step_with_mpi_gets_mpi(tmp_path: Path) -> None:
    """Where srun offers a PMI that the MPI speaks, the world is MPI's."""
    script = tmp_path / "open.py"
    # mpiexec stands in for srun, so each task learns its rank from it.
    script.write_text("import os\nos.environ['SLURM_PROCID'] = os.environ['OMPI_COMM_WORLD_RANK']\n" + OPEN)
    done = mpiexec(2, str(script), **environ(2, 0, tmp_path, SLURM_MPI_TYPE="pmix"))
    if "OMPI_COMM_WORLD_RANK" in done.stderr:
        pytest.skip("mpiexec is not Open MPI's")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("opened") == 2


OWN_MPI = """
import sys
from mpi4py import MPI
from jitmpi.comm import MpiWorld
world = MpiWorld()
world.close()
assert world.held and not MPI.Is_finalized()
MPI.COMM_WORLD.Barrier()
print("still there", flush=True)
"""


def test_mpi_that_the_script_opened_stays_its_own() -> None:
    """Closing the world ends MPI only where the world began it."""
    done = mpiexec(2, "-c", OWN_MPI)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("still there") == 2


def test_singletons_are_an_error_that_names_the_fix(tmp_path: Path) -> None:
    """N silent worlds of one rank never train: MPI, PMI and what to do are said."""
    variables = environ(4, 2, tmp_path, SLURM_MPI_TYPE="pmi2")
    done = mpiexec(1, "-c", OPEN, **variables)
    assert done.returncode != 0
    assert "made a world of 1 rank(s) and calls this one 0, but the step has 4 task(s) and this one is 2" in done.stderr
    assert "--mpi=pmi2" in done.stderr
    assert "srun --mpi=list" in done.stderr


def test_a_step_without_mpi_meets_through_files(tmp_path: Path) -> None:
    """With --mpi=none MPI is not even loaded; one line says how the ranks meet."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", OPEN],
            cwd=ROOT,
            env={**os.environ, **environ(3, rank, tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    answers = [process.communicate(timeout=WAIT) for process in processes]
    assert [out for out, _ in answers] == ["opened files\n"] * 3
    assert [err.count("jit-ckpt: srun starts without MPI") for _, err in answers] == [1, 0, 0]
    assert os.listdir(tmp_path / "7") == []


def test_a_missing_mpi_names_the_fix(tmp_path: Path) -> None:
    """Without mpi4py a step that has MPI does not start, and says what to install or change."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    done = subprocess.run(
        [sys.executable, "-c", OPEN],
        cwd=ROOT,
        env={**os.environ, **environ(2, 0, tmp_path, SLURM_MPI_TYPE="pmix"), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert "BootstrapError: srun offers MPI over pmix, but mpi4py cannot start it (libmpi.so.40" in done.stderr
    assert "srun --mpi=none" in done.stderr


def test_an_mpi_that_ends_the_process_is_explained(tmp_path: Path) -> None:
    """When MPI_Init ends the process itself, as Open MPI does under another PMI, the fix is said once."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(
        "import os\nTHREAD_MULTIPLE = 3\ndef Is_initialized(): return False\ndef Init_thread(level): os._exit(1)\n"
    )
    for rank, times in ((0, 1), (1, 0)):
        variables = environ(2, rank, tmp_path, SLURM_MPI_TYPE="pmi2")
        done = subprocess.run(
            [sys.executable, "-c", OPEN],
            cwd=ROOT,
            env={**os.environ, **variables, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.count("jit-ckpt: MPI ended the process in MPI_Init under --mpi=pmi2. Start with") == times


def test_importing_starts_no_mpi(tmp_path: Path) -> None:
    """Neither `import jitmpi.comm` nor a world of files loads mpi4py."""
    code = "import sys; import jitmpi.comm; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=WAIT, check=True)
    one = Settings(Options(dir=str(tmp_path)), "7", 0, 1, "n1", 0, "")
    assert open_world(one).exchange(b"x", time.monotonic() + 1) == [b"x"]
