"""The packages of this checkout, built by the Makefile as README.md says, and machines to install them on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.packaging.site import Machine, NoTreeError, machines, start_slurm

REPO = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs what a cluster of the test bed needs: root, and Debian's Slurm."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.timeout(2400))  # the first one makes the machines' root file system


def make(*words: str) -> Path:
    """Run `make TARGET [NAME=VALUE ...]` and return the path that it prints last."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", *words], cwd=REPO, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return REPO / done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def deb() -> Path:
    """The Debian package."""
    return make("deb")


@pytest.fixture(scope="session")
def rpm() -> Path:
    """The RPM."""
    return make("rpm")


@pytest.fixture(scope="session")
def build(deb: Path) -> Callable[[Path, str], Path]:
    """Give the maker of a Debian package of another version, from the wheel of the first one."""

    def built(out: Path, version: str) -> Path:
        (wheel,) = (REPO / "build" / "wheel").glob("*.whl")
        command = [REPO / "packaging" / "build-deb", wheel, out]
        env = {**os.environ, "VERSION": version}
        return Path(
            subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
        )

    return built


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, ...]]:
    """Two machines with a running Slurm that know nothing of jit-ckpt: c1 is the controller, and both are nodes."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(machines(tmp_path_factory.mktemp("site"), ("c1", "c2")))
        except NoTreeError as error:
            pytest.skip(f"no machines: {error}")
        start_slurm(found)
        yield found
