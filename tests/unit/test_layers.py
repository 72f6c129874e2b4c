"""What import-linter cannot state about the shape of the code; its own contracts are in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PRODUCT = sorted([*(REPO / "jitmpi").glob("*.py"), *(REPO / "slurm_plugin").glob("*.py")])
LINES, AGENT_LINES, FUNCTION_LINES = 400, 250, 40  # the most that STYLE asks for; a longer one hides a missing stage


def name_of(path: Path) -> str:
    """The module of a source file, for test ids."""
    return ".".join(path.relative_to(REPO).with_suffix("").parts)


def attributes(path: Path) -> set[str]:
    """Every `name.attribute` in a source file."""
    nodes = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute))
    return {f"{n.value.id}.{n.attr}" for n in nodes if isinstance(n.value, ast.Name)}


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many lines a function has, its docstring left out."""
    described = function.body[0] if ast.get_docstring(function) else None
    words = described.end_lineno - described.lineno + 1 if described else 0
    return function.end_lineno - function.lineno + 1 - words


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_sizes(path: Path) -> None:
    """Modules and functions stay small enough to be read at one go."""
    text = path.read_text()
    assert len(text.splitlines()) <= (AGENT_LINES if path.name == "agent.py" else LINES)
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f.name: lines_of(f) for f in functions if lines_of(f) > FUNCTION_LINES}
    assert long == {}


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_head(path: Path) -> None:
    """Every module says in its head what it is."""
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", [p for p in PRODUCT if p.parent.name == "jitmpi"], ids=name_of)
def test_one_reader_of_the_environment(path: Path) -> None:
    """Inside jitmpi only config.py reads the environment."""
    if path.name != "config.py":
        assert attributes(path) & {"os.environ", "os.getenv", "os.environb"} == set()


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_nothing_runs_code_from_a_file(path: Path) -> None:
    """torch.save and torch.load pickle; numpy can: none of them is used."""
    assert attributes(path) & {"torch.save", "torch.load", "np.load", "numpy.load", "np.save", "numpy.save"} == set()


@pytest.mark.parametrize("package", ["jitmpi", "slurm_plugin", "slurm_plugin.relaunch", "jitmpi.cli", "jitmpi.browse"])
def test_import_is_light(package: str) -> None:
    """Importing a package or starting a command loads no torch, MPI or HDF5 before it is needed."""
    heavy = {"jitmpi.browse": {"torch", "mpi4py"}}.get(package, {"torch", "mpi4py", "h5py", "numpy"})
    code = f"import sys, {package}; print([m for m in {sorted(heavy)} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
