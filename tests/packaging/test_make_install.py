"""packaging/install, without a package manager: what it puts below a folder, and how."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import REPO


def put(root: Path, umask: str = "022") -> None:
    """Install below a folder as an administrator with this umask does."""
    line = ["/bin/sh", "-c", f'umask {umask}; exec "$0"', str(REPO / "packaging" / "install")]
    subprocess.run(line, check=True, capture_output=True, timeout=120, env={**os.environ, "DESTDIR": str(root)})


def test_everybody_can_read_what_a_careful_root_installs(tmp_path: Path) -> None:
    """Hardened hosts give root a umask of 077; a snippet of plugstack.conf.d has to be read by every sbatch."""
    put(tmp_path, "077")
    spool = tmp_path / "var/spool/jit-ckpt"
    closed = [
        p for p in tmp_path.rglob("*") if p.stat().st_mode & 0o044 != 0o044 or (p.is_dir() and not p.stat().st_mode & 1)
    ]
    assert closed == [spool]
    assert not [p for p in tmp_path.rglob("*") if p.stat().st_mode & 0o022]


def test_programs_are_replaced_at_once(tmp_path: Path) -> None:
    """Who has one open, or opens it meanwhile, finds all of the old one or all of the new one."""
    put(tmp_path)
    code = [tmp_path / "usr/lib/jit-ckpt", tmp_path / "usr/bin"]
    paths = [p for folder in code for p in folder.rglob("*") if p.is_file()]
    paths += tmp_path.rglob("jit_ckpt.so")
    assert {"prolog", "srun", "jit-srun", "contract.py", "jit_ckpt.so"} <= {p.name for p in paths}
    for path in paths:
        path.write_text("old")
    opened = [path.open() for path in paths]
    put(tmp_path)
    for file in opened:
        with file:
            assert file.read() == "old", file.name
    assert not list(tmp_path.rglob("*.new"))


@pytest.mark.parametrize(("left", "kept"), [("1", True), ("0", False)])
def test_an_upgrade_of_the_rpm_keeps_what_the_new_one_compiled(tmp_path: Path, left: str, kept: bool) -> None:
    """rpm runs the old %preun, with the number of packages that stay, behind the new %post: hooks would be slower."""
    cache = tmp_path / "lib/jit-ckpt/python/jitmpi/__pycache__"
    cache.mkdir(parents=True)
    spec = (REPO / "packaging/rpm/jit-ckpt.spec").read_text(encoding="utf-8")
    text = spec.partition("%preun\n")[2].partition("\n\n")[0].replace("%{_prefix}", str(tmp_path))
    subprocess.run(["/bin/sh", "-c", text, "preun", left], check=True, timeout=30)
    assert cache.exists() == kept


@pytest.mark.parametrize("there", [True, False])
def test_a_package_that_was_damaged_can_be_removed(tmp_path: Path, there: bool) -> None:
    """What was compiled goes; where nothing is left of the code, dpkg has no reason to stop."""
    cache = tmp_path / "usr/lib/jit-ckpt/python/jitmpi/__pycache__"
    if there:
        cache.mkdir(parents=True)
    text = (REPO / "packaging/deb/prerm").read_text(encoding="utf-8").replace("/usr/lib", f"{tmp_path}/usr/lib")
    subprocess.run(["/bin/sh", "-c", text, "prerm", "remove"], check=True, timeout=30)
    assert not cache.exists()
    assert cache.parent.exists() == there
