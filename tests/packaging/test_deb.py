"""The Debian package on machines with a running Slurm: installed, upgraded, removed, purged."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_plugin import contract
from tests.packaging.conftest import make
from tests.packaging.site import Machine, wait_idle

LINE = "/etc/slurm/plugstack.conf.d/jit-ckpt.conf"
CONFIGURATION = ("/etc/jit-ckpt.conf", LINE, "/etc/logrotate.d/jit-ckpt")
HOOKS = ("prolog", "epilog", "epilog-slurmctld", "health-check")


def field(deb: Path, name: str) -> str:
    """One field of a package."""
    return subprocess.run(["dpkg-deb", "-f", deb, name], capture_output=True, text=True, check=True).stdout.strip()


def put(machine: Machine, deb: Path) -> None:
    """Install a package by apt; questions about changed configuration are answered as apt does by default: keep it."""
    shutil.copy(deb, machine.root / "root" / deb.name)
    machine.run("apt-get", "install", "-y", f"./{deb.name}", timeout=120)
    (machine.root / "root" / deb.name).unlink()


def daemons(machine: Machine) -> str:
    """The process ids of Slurm's daemons."""
    return machine.run("pgrep", "slurmd|slurmctld|munged").stdout


def library(machine: Machine) -> Path:
    """The plugin on a machine's disk."""
    (found,) = machine.root.glob("usr/lib/*/jit-ckpt/jit_ckpt.so")
    return found


@pytest.fixture(scope="module")
def before(site: tuple[Machine, ...]) -> set[str]:
    """What was on the disk before the package."""
    return site[0].files()


@pytest.fixture(scope="module")
def installed(site: tuple[Machine, ...], before: set[str], deb: Path) -> Machine:
    """A machine with the package."""
    running = daemons(site[0])
    put(site[0], deb)
    assert daemons(site[0]) == running, "nothing is restarted by an installation"
    return site[0]


def test_depends_on_the_slurm_it_was_built_for(deb: Path) -> None:
    """The package goes with one major.minor of Slurm, from Debian's packages or from those of Slurm's makers."""
    version = field(deb, "Version").partition("+slurm")[2]
    headers = subprocess.run(["dpkg-query", "-Wf", "${Version}", "libslurm-dev"], capture_output=True, text=True).stdout
    assert headers.startswith(f"{version}.")
    major, minor = version.split(".")
    lower = f"slurm-wlm-basic-plugins (>= {version}) | slurm-smd (>= {version})"
    upper = lower.replace(">=", "<<").replace(version, f"{major}.{int(minor) + 1:02d}~")
    assert field(deb, "Depends") == f"libc6, python3 (>= 3.11), {lower}, {upper}"


def test_holds_what_make_install_puts_into_place(deb: Path, tmp_path: Path) -> None:
    """A host without packages gets the same files at the same places, and keeps the configuration that it had."""
    conf = tmp_path / "etc" / "jit-ckpt.conf"
    conf.parent.mkdir()
    conf.write_text("keep = 3\n", encoding="utf-8")
    make("install", f"DESTDIR={tmp_path}")
    assert conf.read_text(encoding="utf-8") == "keep = 3\n"
    shown = subprocess.run(["dpkg-deb", "-c", deb], capture_output=True, text=True, check=True).stdout
    packed = {line.split()[5][2:] for line in shown.splitlines() if not line.startswith("d")}
    placed = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    only = {name for name in packed if name.endswith((".whl", "/copyright", "/changelog.gz"))}
    assert placed == packed - only | {"usr/share/doc/jit-ckpt/CHANGELOG.md"}


def test_what_is_installed_works(installed: Machine) -> None:
    """The option is there, both commands answer without torch or h5py, the hooks end with 0, the spool is root's."""
    assert "--jit-ckpt" in installed.run("sbatch", "--help").stdout
    for command in ("jit-ckpt", "jit-srun"):
        assert installed.run(command, "--help").stdout.startswith(f"usage: {command}")
    for hook in HOOKS:
        installed.run(f"/usr/lib/jit-ckpt/{hook}")
    assert installed.run("stat", "-c", "%U %a", contract.SPOOL).stdout == "root 700\n"
    assert installed.run("stat", "-c", "%U %a", *CONFIGURATION).stdout == "root 644\n" * 3


def test_logrotate_takes_its_part(installed: Machine, tmp_path: Path) -> None:
    """logrotate reads the installed file without a complaint and rotates the log that it names."""
    log, conf = tmp_path / "jit-ckpt.log", tmp_path / "conf"
    log.write_text("a line\n", encoding="utf-8")
    text = (installed.root / "etc/logrotate.d/jit-ckpt").read_text(encoding="utf-8")
    conf.write_text(text.replace("/var/log/jit-ckpt.log", str(log)), encoding="utf-8")
    command = ["logrotate", "--force", "--state", tmp_path / "state", conf]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert log.with_suffix(".log.1").read_text(encoding="utf-8") == "a line\n"
    assert log.stat().st_mode & 0o777 == 0o644


def test_a_plugin_of_another_slurm_hurts_nobody(installed: Machine) -> None:
    """After an upgrade of Slurm alone sbatch and srun work as without us, and the option is unknown."""
    ours = library(installed)
    good = ours.read_bytes()
    number = int(installed.run("sh", "-c", "sbatch --version").stdout.split()[-1].split(".")[0])
    minor = int(installed.run("sh", "-c", "sbatch --version").stdout.split()[-1].split(".")[1])
    stamps = [i for i in range(len(good) - 3) if good[i + 1 : i + 4] == bytes((minor, number, 0))]
    assert stamps, "the plugin holds the number of its Slurm"
    other = bytearray(good)
    for at in stamps:
        other[at + 2] += 1
    ours.write_bytes(other)
    try:
        assert installed.run("srun", "-p", "main", "hostname").stdout in ("c1\n", "c2\n")
        refused = installed.run("sbatch", "--jit-ckpt", "--wrap", "true", check=False)
        assert refused.returncode != 0
        assert "unrecognized option" in refused.stderr
    finally:
        ours.write_bytes(good)


def test_an_upgrade_keeps_what_was_edited(
    installed: Machine, build: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    """Configuration that an administrator changed stays as it is, and nobody asks."""
    for name in CONFIGURATION:
        with open(installed.root / name[1:], "a", encoding="utf-8") as file:
            file.write("# ours\n")
    running = daemons(installed)
    put(installed, build(tmp_path, "9.9"))
    assert installed.run("dpkg-query", "-Wf", "${Version}", "jit-ckpt").stdout.startswith("9.9+slurm")
    for name in CONFIGURATION:
        assert (installed.root / name[1:]).read_text(encoding="utf-8").endswith("# ours\n")
    assert daemons(installed) == running


def test_removal_hurts_nobody(installed: Machine, site: tuple[Machine, ...], deb: Path) -> None:
    """After `apt remove` jobs run without a word of ours and no node is drained, although slurm.conf still names us.

    So does a folder of hooks, by a link.
    An installation later brings back what was edited, plugstack.conf's line too.
    """
    conf = installed.root / "etc/slurm/slurm.conf"
    before = conf.read_text(encoding="utf-8")
    link = installed.root / "etc/slurm/epilog.d/jit-ckpt"  # as INSTALL.md says where there are other hooks
    link.parent.mkdir()
    link.symlink_to("/usr/lib/jit-ckpt/epilog")
    conf.write_text(f"{before}Prolog=/usr/lib/jit-ckpt/prolog\nEpilog=/etc/slurm/epilog.d/*\n", encoding="utf-8")
    installed.run("systemctl", "restart", "slurmd")
    installed.run("apt-get", "remove", "-y", "jit-ckpt", timeout=120)
    assert {name for name in CONFIGURATION if not (installed.root / name[1:]).exists()} == {LINE}
    assert not list(installed.root.glob("usr/lib/*/jit-ckpt/jit_ckpt.so"))
    done = installed.run("srun", "-p", "main", "-w", "c1", "hostname")
    assert (done.stdout, done.stderr) == ("c1\n", "")
    wait_idle(site[0])
    put(installed, deb)
    assert (installed.root / LINE[1:]).read_text(encoding="utf-8").endswith("# ours\n")
    assert "--jit-ckpt" in installed.run("sbatch", "--help").stdout
    installed.run("apt-get", "remove", "-y", "jit-ckpt", timeout=120)
    conf.write_text(before, encoding="utf-8")
    shutil.rmtree(link.parent)
    installed.run("systemctl", "restart", "slurmd")


def test_purge_leaves_nothing(installed: Machine, before: set[str]) -> None:
    """`apt purge` leaves no file and no folder of ours, the spool, the log and the site's own checks included."""
    for name in ("var/log/jit-ckpt.log", "var/log/jit-ckpt.log.2.gz", "etc/jit-ckpt/checks.d/own"):
        (installed.root / name).parent.mkdir(parents=True, exist_ok=True)
        (installed.root / name).touch()
    installed.run("apt-get", "purge", "-y", "jit-ckpt", timeout=120)
    assert installed.files() - before == set()
    assert before - installed.files() == set()
    for name in ("usr/lib/jit-ckpt", "usr/share/jit-ckpt", "etc/jit-ckpt", "var/spool/jit-ckpt"):
        assert not (installed.root / name).exists()
