"""The built library: what it shows to Slurm, how it is hardened, how it installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SPANK = Path(__file__).resolve().parents[2] / "spank"
DATA = {"plugin_name", "plugin_type", "plugin_version", "spank_plugin_version"}
HOOKS = {"slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_exit"}


def call(*command: str) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root folder with the plugin installed from a build of its own."""
    root = tmp_path_factory.mktemp("root")
    call("make", "-C", str(SPANK), f"BUILD={root}/build", f"DESTDIR={root}", "LIBDIR=/usr/lib/jit-ckpt", "install")
    return root


def test_exports_only_what_slurm_needs(installed: Path) -> None:
    """Nothing but the hooks and plugin data is visible, so that no name of ours meets one of Slurm's."""
    lines = call("nm", "-D", "--defined-only", f"{installed}/usr/lib/jit-ckpt/jit_ckpt.so").splitlines()
    assert {line.split()[-1].partition("@")[0] for line in lines} == DATA | HOOKS


def test_needs_only_libc_and_slurm(installed: Path) -> None:
    """It pulls no library into sbatch or slurmstepd, and calls nothing that ends or pauses its host."""
    library = f"{installed}/usr/lib/jit-ckpt/jit_ckpt.so"
    needed = [line for line in call("readelf", "-d", library).splitlines() if "(NEEDED)" in line]
    assert len(needed) == 1
    assert "libc.so.6" in needed[0]
    wanted = {line.split()[-1].partition("@")[0] for line in call("nm", "-D", "-u", library).splitlines()}
    assert not wanted & {
        "exit",
        "_exit",
        "abort",
        "raise",
        "kill",
        "sleep",
        "usleep",
        "nanosleep",
        "system",
        "popen",
        "fork",
    }


def test_hardened(installed: Path) -> None:
    """Read-only relocations at once, no executable stack, stack protector and fortified calls."""
    library = f"{installed}/usr/lib/jit-ckpt/jit_ckpt.so"
    dynamic, headers, names = call("readelf", "-d", library), call("readelf", "-lW", library), call("nm", "-D", library)
    assert "BIND_NOW" in dynamic
    assert "GNU_RELRO" in headers
    assert next(line for line in headers.splitlines() if "GNU_STACK" in line).split()[-2] == "RW"
    assert "__stack_chk_fail" in names
    assert "_chk" in names.replace("__stack_chk_fail", "")


def test_snippet_is_optional(installed: Path) -> None:
    """The installed line loads the library as `optional`."""
    snippet = (installed / "etc/slurm/plugstack.conf.d/jit-ckpt.conf").read_text()
    assert snippet == "optional /usr/lib/jit-ckpt/jit_ckpt.so\n"


def test_snippet_of_another_prefix(installed: Path, tmp_path: Path) -> None:
    """Installed elsewhere, the line tells the plugin where our srun, and the site's file, are."""
    elsewhere = ("LIBDIR=/opt/jit/lib", "PREFIX=/opt/jit", "SYSCONFDIR=/opt/etc")
    call("make", "-C", str(SPANK), f"BUILD={installed}/build", f"DESTDIR={tmp_path}", *elsewhere, "install")
    snippet = (tmp_path / "etc/slurm/plugstack.conf.d/jit-ckpt.conf").read_text()
    words = "shim-dir=/opt/jit/lib/jit-ckpt/bin conf=/opt/etc/jit-ckpt.conf"
    assert snippet == f"optional /opt/jit/lib/jit_ckpt.so {words}\n"


def test_small_files_and_format() -> None:
    """Files stay under 500 lines and as clang-format writes them."""
    sources = sorted([*SPANK.glob("*.c"), *SPANK.glob("*.h")])
    assert max(len(path.read_text().splitlines()) for path in sources) <= 500
    call("clang-format", "--dry-run", "-Werror", *map(str, sources))
