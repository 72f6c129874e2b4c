"""Nothing of ours hurts a node: whatever of it is broken, nodes stay idle and jobs run, protected or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_plugin import contract
from testbed import Cluster, plugin
from testbed.commands import TestbedError

NODE = "n1"
SLEEPER = "#!/bin/sh\nsleep 60\n"
CRASH = "def main():\n    raise RuntimeError('a bug of ours')\n"


def missing_interpreter(cluster: Cluster) -> None:
    cluster.write_site("python = /nonexistent/python3\n")


def malformed_site_file(cluster: Cluster) -> None:
    cluster.write_site("keep = many\nno such line\n\x00\n")


def unreadable_site_file(cluster: Cluster) -> None:
    cluster.settings.site_file.chmod(0)


def site_file_is_a_folder(cluster: Cluster) -> None:
    cluster.settings.site_file.unlink()
    cluster.settings.site_file.mkdir()


def hooks_without_their_code(cluster: Cluster) -> None:
    rewrite_hooks(cluster, Path("/nonexistent"))


def hooks_that_crash(cluster: Cluster) -> None:
    package = cluster.settings.folder / "crash" / "slurm_plugin"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module in ("prolog", "epilog", "controller_epilog", "health_check"):
        (package / f"{module}.py").write_text(CRASH)
    rewrite_hooks(cluster, package.parent)


def full_spool(cluster: Cluster) -> None:
    spool(cluster, "mount -t tmpfs -o size=4k,mode=700 full $spool; head -c 100000 /dev/zero >$spool/filler; true")


def read_only_spool(cluster: Cluster) -> None:
    spool(cluster, "mount -t tmpfs -o ro,mode=700 locked $spool")


def spool_that_is_a_file(cluster: Cluster) -> None:
    spool(cluster, "rm -rf $spool; echo surprise >$spool")


def spool_that_all_can_write(cluster: Cluster) -> None:
    spool(cluster, "mkdir -p $spool; chmod 777 $spool")


def checks_that_hang(cluster: Cluster) -> None:
    folder = cluster.settings.folder / "checks.d"
    folder.mkdir(mode=0o755)
    (folder / "slow").write_text(SLEEPER)
    (folder / "slow").chmod(0o755)
    cluster.write_site(f"check-patience = 1\nchecks-dir = {folder}\n")


def library_that_does_not_load(cluster: Cluster) -> None:
    for library in (cluster.settings.folder / "plugin").rglob("*.so"):
        library.rename(library.with_suffix(".away"))
        library.write_bytes(b"no ELF file\n")


BREAKAGES = (
    missing_interpreter,
    malformed_site_file,
    unreadable_site_file,
    site_file_is_a_folder,
    hooks_without_their_code,
    hooks_that_crash,
    full_spool,
    read_only_spool,
    spool_that_is_a_file,
    spool_that_all_can_write,
    checks_that_hang,
    library_that_does_not_load,
)


def spool(cluster: Cluster, command: str) -> None:
    """Do something to the spool of one node; undone by `mended`."""
    cluster.on(NODE, "sh", "-c", f"spool={contract.SPOOL}; mkdir -p $spool; {command}")


def rewrite_hooks(cluster: Cluster, code: Path) -> None:
    for hook in (cluster.settings.folder / "hooks").iterdir():
        line = [str(plugin.WRAPPER), hook.name, str(code), str(cluster.settings.site_file)]
        hook.write_text(cluster.on("head", *line).stdout)


@pytest.fixture
def mended(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards everything is as the test bed installs it."""
    yield cluster
    site_file = cluster.settings.site_file
    if site_file.is_dir():
        site_file.rmdir()
    cluster.write_site("")
    site_file.chmod(0o644)
    for library in (cluster.settings.folder / "plugin").rglob("*.away"):
        library.rename(library.with_suffix(".so"))
    rewrite_hooks(cluster, plugin.REPO)
    cluster.on(NODE, "sh", "-c", f"umount {contract.SPOOL} 2>/dev/null; rm -rf {contract.SPOOL}", check=False)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__.replace("_", " "))
def test_jobs_run_and_nodes_stay(breakage: Callable[[Cluster], None], mended: Cluster, out: Path) -> None:
    """On a node where our side is broken jobs with and without the option run to a good end, and it stays idle."""
    breakage(mended)
    out.mkdir()
    out.chmod(0o777)
    common = (f"--nodelist={NODE}", "--time=2", "--chdir", str(out))
    script = "#!/bin/bash\nsrun sh -c 'echo ran on $(hostname)'\n"
    jobs = [mended.sbatch(*common, f"--output={out}/plain", script=script, user=True)]
    option = f"--jit-ckpt=dir={out}/checkpoints"
    if breakage is library_that_does_not_load:  # then sbatch does not know the option, and says so
        with pytest.raises(TestbedError, match="jit-ckpt"):
            mended.sbatch(*common, option, script=script, user=True)
    else:
        jobs.append(mended.sbatch(*common, option, f"--output={out}/protected", script=script, user=True))
    for job, name in zip(jobs, ("plain", "protected"), strict=False):
        mended.wait_state(job, "COMPLETED", 60)
        assert f"ran on {NODE}" in (out / name).read_text()
    mended.wait_idle(30)
