"""Put the project's plugin and hooks into a cluster's own folder, the way a site would install them.

Rule: the hooks run under the distribution's python3, isolated (-I); only this checkout is added to its path.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from testbed.commands import TestbedError, run
from testbed.namespaces import RUN

REPO: Final = Path(__file__).resolve().parent.parent
LIBRARY: Final = "jit_ckpt.so"
BUILD_TIMEOUT: Final = 120.0  # seconds for the C plugin; it takes about two
WRAPPER: Final = REPO / "packaging" / "wrapper"  # the maker of the packages' own hooks


def install_library(folder: Path) -> Path:
    """Build the SPANK plugin and install it below `folder`; return the path of the library.

    Raises:
        TestbedError: it does not build, or installs no library.
    """
    RUN.mkdir(parents=True, exist_ok=True)
    with open(RUN / ".build.lock", "w", encoding="utf-8") as lock:  # clusters that start together share one source tree
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-C", str(REPO / "spank"), f"DESTDIR={folder}", "install"]
        run(command, timeout=BUILD_TIMEOUT, env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")})
    found = sorted(folder.rglob(LIBRARY))
    if not found:
        raise TestbedError(f"`{' '.join(command)}` installed no {LIBRARY}")
    return found[0]


def install_hook(name: str, folder: Path, site_file: Path) -> Path:
    """Write the wrapper that slurmctld or slurmd runs; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(run([str(WRAPPER), name, str(REPO), str(site_file)]).stdout, encoding="utf-8")
    path.chmod(0o755)
    return path


def install_shim(folder: Path, site_file: Path) -> None:
    """Put the srun that batch scripts find first into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (REPO / "packaging" / "srun").read_text(encoding="utf-8")
    for line, ours in (
        ("code=/usr/lib/jit-ckpt/python", f"code={REPO}"),
        ("conf=/etc/jit-ckpt.conf", f"conf={site_file}"),
    ):
        if line not in text:
            raise TestbedError(f"packaging/srun has no line {line!r} any more")
        text = text.replace(line, ours)
    (folder / "srun").write_text(text, encoding="utf-8")
    (folder / "srun").chmod(0o755)


def plugstack_conf(library: Path | None, site_file: Path, shim_folder: Path) -> str:
    """Write plugstack.conf; `optional`, so that a plugin that does not load hurts nobody."""
    return f"optional {library} conf={site_file} shim-dir={shim_folder}\n" if library else ""
