"""Run a command in another Debian release: a root file system of its own, and in it a clone of what is committed here.

    python3 -m testbed.release trixie make test                    # all tests on Debian 13's Slurm and Python
    python3 -m testbed.release forky make test TESTS=tests/spank   # any command, in the clone
    python3 -m testbed.release --remove trixie

Rule 1: every mount lies in a mount namespace that ends with the command, and the command ends with this process,
however that ends. So there is nothing to clean up, and removing the folder can remove nothing else.
Rule 2: a root file system gets its name when it is whole. It is made once; its packages and the clone's .venv stay.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from testbed import borrowed
from testbed.commands import TestbedError, run
from testbed.machine import SYSTEM_PATH
from testbed.plugin import REPO

ROOTS: Final = Path("/var/cache/jit-testbed")
CLONE: Final = "srv/jit-ckpt"  # in the root file system; /tmp and /root would be hidden from the hosts of a test bed
INCLUDE: Final = "ca-certificates,make"  # as on a machine of CI; `make` installs the rest
SCRIPTS: Final = Path("/usr/share/debootstrap/scripts")
PASSED: Final = ("TERM", "CI", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # besides PIP_*
NAME: Final = r"[a-z]+"  # of a release

# Its mounts and processes end with it, and it ends with its parent.
APART: Final = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--kill-child",
)

# ENTER ROOT FOLDERS COMMAND...: each of FOLDERS (apart by newlines) is seen at its own path, read-only. The last shell
# stays process 1 of the namespace: it collects orphans, and all that still runs ends with it.
ENTER: Final = f"""\
root=$1 folders=$2
shift 2
mount --bind "$root" "$root"
cd "$root"
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount --rbind /sys sys
mount -t tmpfs -o mode=755 tmpfs run
mkdir -p run/lock old
IFS='
'
for folder in $folders; do
    mkdir -p ".$folder"
    mount --bind -o ro "$folder" ".$folder"
done
unset IFS
pivot_root . old
mount -t proc proc /proc
umount -l /old
find /tmp -mindepth 1 -delete
cd /{CLONE}
exec /bin/sh -c '"$@"; exit $?' sh "$@"
"""


@contextlib.contextmanager
def held(release: str, roots: Path = ROOTS) -> Iterator[Path]:
    """Keep other runs out of the root file system of a release, and return its folder, which need not exist.

    Raises:
        TestbedError: another run is in it.
    """
    roots.mkdir(parents=True, exist_ok=True)
    with open(roots / f"{release}.lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = (
                f"another run is in {roots / release}; wait for its end, or give a folder of your own (--roots, ROOTS=)"
            )
            raise TestbedError(why) from error
        yield roots / release


def make(release: str, root: Path, include: str = INCLUDE) -> None:
    """Make a root file system with the release's smallest set of packages and those that are named.

    Raises:
        TestbedError: this machine's apt names no mirror, or debootstrap failed; nothing is at `root` then.
    """
    half = root.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    targets = run(["apt-get", "indextargets", "--format", borrowed.TARGET, "Created-By: Packages"]).stdout
    mirror = borrowed.mirror(targets, platform.freedesktop_os_release().get("VERSION_CODENAME", ""))
    script = () if (SCRIPTS / release).exists() else (str(SCRIPTS / "sid"),)  # a release newer than this debootstrap
    command = ["debootstrap", "--variant=minbase", f"--include={include}", release, str(half), mirror, *script]
    environ = os.environ | borrowed.proxies(run(["apt-config", "dump"]).stdout)
    if _wait([*APART, "--mount-proc", *command], environ):
        raise TestbedError(f"{' '.join(command)} failed; its log is {half}/debootstrap/debootstrap.log")
    (half / "etc/apt/sources.list").write_text(f"deb {mirror} {release} main\n", encoding="utf-8")
    # Without syncing every file packages install much faster, and after a power failure a new one is made.
    (half / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n", encoding="utf-8")
    half.rename(root)


def borrow(root: Path) -> None:
    """Copy what the network, apt and pip need from this machine; each time, as it may have changed."""
    dump = run(["apt-config", "dump"]).stdout
    (root / "etc/apt/apt.conf.d/90machine").write_text(borrowed.apt_conf(dump), encoding="utf-8")
    home = Path.home()
    for source in (Path("/etc/resolv.conf"), Path("/etc/hosts"), *borrowed.pip_files(os.environ, home)):
        seen = Path("/root") / source.relative_to(home) if source.is_relative_to(home) else source
        target = root / seen.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # it may be a link to somewhere on this machine
        shutil.copyfile(source, target)


def clone(root: Path) -> str:
    """Bring the clone to this checkout's last commit and remove all but .venv from it; return the commit."""
    folder = root / CLONE
    folder.mkdir(parents=True, exist_ok=True)
    git = ["git", "-C", str(folder)]
    run([*git, "init", "-q"])
    run([*git, "fetch", "-q", "--no-tags", str(REPO), "HEAD"])
    run([*git, "checkout", "-q", "-f", "--detach", "FETCH_HEAD"])  # unchanged files keep their times, for make
    run([*git, "clean", "-q", "-ffdx", "-e", "/.venv"])
    return run([*git, "log", "-1", "--format=%h %s"]).stdout.strip()


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of a fresh root login, with pip's settings."""
    kept = {key: value for key, value in environ.items() if key in PASSED or key.startswith("PIP_")}
    own = {
        "PATH": SYSTEM_PATH,
        "HOME": "/root",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
    }
    return {**kept, **own, "PIP_NO_CACHE_DIR": "1"}  # .venv stays, a cache beside it would only double its size


def enter(root: Path, command: Sequence[str], folders: Iterable[Path]) -> int:
    """Run a command in the clone, with this process's input and output; return its exit code.

    Args:
        folders: of this machine, to be seen inside at the same paths, read-only.
    """
    seen = "\n".join(str(path) for path in folders)
    return _wait([*APART, "sh", "-euc", ENTER, "sh", str(root), seen, *command], environment(os.environ))


def _wait(command: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        child = subprocess.Popen(list(command), env=dict(environ))
    except OSError as error:
        raise TestbedError(f"{command[0]}: cannot start: {error.strerror}; `make deps` installs it") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command, which may have to clean up
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGINT, before)


def _say(release: str, text: str) -> None:
    print(f"== {release}: {text}", flush=True)


def _size(root: Path) -> str:
    return run(["du", "-shx", str(root)], check=False).stdout.split("\t")[0]


def carry_out(release: str, command: Sequence[str], roots: Path) -> int:
    """Make the root file system if there is none, bring the clone up to date and run the command in it."""
    began = time.monotonic()
    with held(release, roots) as root:
        if not root.exists():
            _say(release, f"makes {root} (then about 1.5 GB of packages, and Python's in .venv)")
            make(release, root)
            _say(release, f"made in {time.monotonic() - began:.0f} s")
        borrow(root)
        _say(release, f"clone of {clone(root)}")
        if run(["git", "-C", str(REPO), "status", "--porcelain"]).stdout:
            _say(release, "what is not committed here is not in it")
        began = time.monotonic()
        code = enter(root, command, borrowed.pip_folders(os.environ, Path.home()))
        _say(release, f"`{' '.join(command)}` ended with {code} after {time.monotonic() - began:.0f} s")
        _say(release, f"{root} takes {_size(root)}; remove it with `--remove {release}`, see testbed/README.md")
    return code


def remove(release: str, roots: Path) -> None:
    """Remove the root file system of a release, whole or half-made; nothing happens if there is none."""
    with held(release, roots) as root:
        for folder in (root, root.with_suffix(".half")):
            if folder.exists():
                shutil.rmtree(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the command's exit code; 1 with one line if it could not be run."""
    parser = argparse.ArgumentParser(prog="python3 -m testbed.release", description=__doc__.splitlines()[0])
    parser.add_argument("release", help="bookworm, trixie, forky, ...")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="run in the clone (default: make test)")
    parser.add_argument("--remove", action="store_true", help="remove the root file system instead")
    parser.add_argument("--roots", type=Path, default=ROOTS, help=f"where they lie (default: {ROOTS})")
    args = parser.parse_args(argv)
    try:
        if not re.fullmatch(NAME, args.release):
            raise TestbedError(f"{args.release!r} is no name of a Debian release")
        if os.geteuid() != 0:
            raise TestbedError("a root file system of another release needs root")
        if args.remove:
            remove(args.release, args.roots.resolve())
            return 0
        return carry_out(args.release, args.command or ["make", "test"], args.roots.resolve())
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
