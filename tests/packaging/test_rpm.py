"""The RPM: what it holds and does, tried with Debian's rpm in a root file system of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from slurm_plugin import contract
from tests.packaging.site import Machine, NoTreeError, machines


def query(rpm: Path, *words: str) -> list[str]:
    """Ask the package."""
    command = ["rpm", "-qp", *words, rpm]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def files_of_deb(deb: Path) -> set[str]:
    """The files of the Debian package."""
    shown = subprocess.run(["dpkg-deb", "-c", deb], capture_output=True, text=True, check=True, timeout=60).stdout
    return {line.split()[5][1:] for line in shown.splitlines() if not line.startswith("d")}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine without any package of ours."""
    with ExitStack() as stack:
        try:
            (found,) = stack.enter_context(machines(tmp_path, ("c1",)))
        except NoTreeError as error:
            pytest.skip(f"no machine: {error}")
        yield found


def test_holds_what_the_debian_package_holds(rpm: Path, deb: Path) -> None:
    """Both packages have the same files, except for the folder of libraries and what only Debian wants."""
    listed = {line.split()[0] for line in query(rpm, "-l", "--dump") if not line.split()[4].startswith("04")}
    moved = {f"/usr/lib64/jit-ckpt/{Path(p).name}" if p.endswith(".so") else p for p in files_of_deb(deb)}
    only_debian = {"/usr/share/doc/jit-ckpt/changelog.gz", "/usr/share/doc/jit-ckpt/copyright"}
    assert listed == moved - only_debian | {"/usr/share/doc/jit-ckpt/CHANGELOG.md"}
    assert "/var/spool/jit-ckpt" in {
        line.split()[0] for line in query(rpm, "-l", "--dump") if "040700 root root" in line
    }


def test_goes_with_one_slurm(rpm: Path) -> None:
    """It needs the major.minor of Slurm that it was built for, and takes the place of no other package."""
    version = rpm.name.partition(".slurm")[2].rsplit(".", 2)[0]
    major, minor = version.split(".")
    assert {f"slurm >= {version}", f"slurm < {major}.{int(minor) + 1:02d}"} <= set(query(rpm, "--requires"))


def test_configuration_survives(rpm: Path, machine: Machine) -> None:
    """An edited file stays as it is when the package is installed again, and is kept as .rpmsave when it goes."""
    assert sorted(query(rpm, "--configfiles")) == [
        "/etc/jit-ckpt.conf",
        "/etc/logrotate.d/jit-ckpt",
        "/etc/slurm/plugstack.conf.d/jit-ckpt.conf",
    ]
    before = machine.files()
    shutil.copy(rpm, machine.root / "root")
    forced = ["--force-debian"] if "--force-debian" in machine.run("rpm", "--help").stdout else []  # in Debian 12
    command = ["rpm", *forced, "--nodeps"]  # Slurm is there, but not as an RPM
    machine.run(*command, "-i", rpm.name)
    assert machine.run("stat", "-c", "%U %a", contract.SPOOL).stdout == "root 700\n"
    conf = machine.root / "etc/jit-ckpt.conf"
    with open(conf, "a", encoding="utf-8") as file:
        file.write("# ours\n")
    machine.run(*command, "-U", "--replacepkgs", rpm.name)
    (machine.root / "root" / rpm.name).unlink()
    assert conf.read_text(encoding="utf-8").endswith("# ours\n")
    machine.run(*command, "-e", "jit-ckpt")
    left = {path for path in machine.files() - before if not path.startswith("var/lib/rpm/")}
    assert left == {"etc/jit-ckpt.conf.rpmsave"}
