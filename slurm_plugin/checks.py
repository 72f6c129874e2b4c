"""All checks of a node: which there are, which the site wants, and one look that runs them together.

Rule 1: every check begins before any is waited for, so a look lasts as long as its slowest check, and never much longer
        than the site's patience.
Rule 2: a check that fails, or that has nothing to look at here, says nothing against the node.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slurm_plugin import gpu, kernel_log, links, mounts, site_checks
from slurm_plugin.child import Child
from slurm_plugin.evidence import BAD, NOTE, Finding
from slurm_plugin.site import Site
from slurm_plugin.spool import Spool

TOOLS: Final = "/usr/bin:/bin:/usr/local/bin:/opt/rocm/bin"
SLURM_CONF: Final = (
    "/etc/slurm/slurm.conf",
    "/run/slurm/conf/slurm.conf",
)  # the second one where it comes over the net
LONGEST_CONF: Final = 16 << 20  # bytes
MOST: Final = {"health-check": 45.0}  # seconds: slurmd kills its HealthCheckProgram after 60, and a verdict takes a few
MIB: Final = 1 << 20
ON: Final = ("on",)

End = Callable[[], list[Finding]]


class Seen(NamedTuple):
    """What a look has found, and the last record of the kernel's log that it has judged (None for none)."""

    findings: list[Finding]
    last: int | None


@dataclass(frozen=True)
class Look:
    """One occasion to look at this node.

    Attributes:
        hook, job: "prolog", "epilog" or "health-check"; the job's number, "" for none.
        environ: what Slurm told the hook.
        spool: None where it cannot be used.
        since: the kernel's log counts from there on; None to leave it out.
        tools, kmsg, sysfs, nvidia_caps: where things are; tests have their own.
        owner: whose files are trusted.
    """

    hook: str
    node: str
    site: Site
    job: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    spool: Spool | None = None
    since: int | None = None
    tools: str = TOOLS
    kmsg: str = kernel_log.DEVICE
    sysfs: str = "/sys"
    nvidia_caps: str = "/dev/nvidia-caps"
    owner: int = 0

    def find(self, tool: str) -> str:
        """Return the path of a program, "" if it is not installed."""
        paths = (os.path.join(folder, tool) for folder in self.tools.split(":"))
        return next((path for path in paths if os.access(path, os.X_OK)), "")


Check = Callable[[Look, float], End]


def look(at: Look, table: Mapping[str, Check] | None = None) -> Seen:
    """Run the checks of the table (all of this module) that the site wants, and return everything they found."""
    wanted, checks = at.site.checks, CHECKS if table is None else table
    known = (*checks, kernel_log.CHECK)
    names = [name for name in known if name in wanted or wanted == ON]
    unknown = [name for name in wanted if name not in (*known, "on", "off")]
    findings = [Finding(name, NOTE, f"there is no check {name}") for name in unknown]
    deadline = time.monotonic() + min(at.site.check_patience, MOST.get(at.hook, at.site.check_patience))
    ends = [(name, _begin(name, checks[name], at, deadline)) for name in names if name in checks]
    last = None
    if kernel_log.CHECK in names and at.since is not None:
        try:
            found, last = kernel_log.read(at.since, at.kmsg)
            findings += found
        except OSError as error:
            findings.append(Finding(kernel_log.CHECK, NOTE, f"the kernel's log cannot be read: {error.strerror}"))
    for name, end in ends:
        findings += _end(name, end)
    return Seen(findings, last)


def _begin(name: str, check: Check, at: Look, deadline: float) -> End:
    try:
        return check(at, deadline)
    except Exception as error:  # Rule 2
        failed = Finding(name, NOTE, f"check {name} failed: {error}")
        return lambda: [failed]


def _end(name: str, end: End) -> list[Finding]:
    try:
        return end()
    except Exception as error:  # Rule 2
        return [Finding(name, NOTE, f"check {name} failed: {error}")]


def _gpu(at: Look, deadline: float) -> End:
    """Start nvidia-smi and rocm-smi where they are installed."""
    nvidia, amd = at.find("nvidia-smi"), at.find("rocm-smi")
    if not nvidia and not amd:
        return list
    expected = 0 if _has_slices(at.nvidia_caps) else max(gpu.of_job(at.environ), gpu.of_node(_slurm_conf(at), at.node))
    asked = Child.start([nvidia, *gpu.NVIDIA_QUERY]) if nvidia else None
    asked_amd = Child.start([amd, *gpu.AMD_QUERY]) if amd else None

    def end() -> list[Finding]:
        found = []
        if asked:
            answer = asked.end(deadline)
            found += gpu.nvidia(answer.text, answer.code, expected)
        if asked_amd:
            answer = asked_amd.end(deadline)
            # a node with both: slurm.conf does not say how many of each
            found += gpu.amd(answer.text, answer.code, _ras(at.sysfs), 0 if asked else expected)
        return found

    return end


def _links(at: Look, deadline: float) -> End:
    boot = kernel_log.boot_id()
    before = links.parse_known(at.spool.read(links.FILE), boot) if at.spool else frozenset()
    found, known = links.compare(before, links.read(f"{at.sysfs}/class"))
    if at.spool and known != before:
        at.spool.write(links.FILE, links.write_known(known, boot))
    return lambda: found


def _mounts(at: Look, deadline: float) -> End:
    return mounts.begin(at.site.mounts, deadline, at.spool) if at.site.mounts else list


def _spool(at: Look, deadline: float) -> End:
    """Look for room in the spool; only a limit that the site wrote down itself makes a node bad."""
    if not at.spool or at.spool.free() >= at.site.spool_free * MIB:
        return list
    grade = BAD if "spool-free" in at.site.given else NOTE
    what = f"{at.spool.path} has {at.spool.free() // MIB} MiB free, less than {at.site.spool_free}"
    return lambda: [Finding("spool", grade, what)]


def _site(at: Look, deadline: float) -> End:
    told = {"JIT_CKPT_HOOK": at.hook, "SLURMD_NODENAME": at.node, "SLURM_JOB_ID": at.job}
    return site_checks.begin(at.site.checks_dir, deadline, told, at.owner)


CHECKS: Final[dict[str, Check]] = {
    gpu.CHECK: _gpu,
    links.CHECK: _links,
    mounts.CHECK: _mounts,
    "spool": _spool,
    site_checks.CHECK: _site,
}


def _slurm_conf(at: Look) -> str:
    """Return the text of slurm.conf and of what it includes, "" if it cannot be read."""
    from glob import glob  # here and below: only nodes with GPUs need it

    for path in (at.environ.get("SLURM_CONF", ""), *SLURM_CONF):
        text = _text(path) if path.startswith("/") else ""
        if text:
            included = re.findall(r"^\s*include\s+(\S+)", text, re.IGNORECASE | re.MULTILINE)
            folder = os.path.dirname(path)
            files = [file for name in included for file in glob(os.path.join(folder, name))]
            return "\n".join([text, *map(_text, files)])
    return ""


def _ras(sysfs: str) -> dict[str, str]:
    """Return the error counters of the amdgpu driver: "card0/umc" -> text."""
    from glob import glob

    found = {}
    for path in glob(f"{sysfs}/class/drm/card*/device/ras/*_err_count"):
        parts = path.split("/")
        found[f"{parts[-4]}/{parts[-1].removesuffix('_err_count')}"] = _text(path)
    return found


def _has_slices(folder: str) -> bool:
    """Whether GPUs are split into MIG instances: then Slurm counts instances, and nvidia-smi counts GPUs."""
    try:
        return bool(set(os.listdir(folder)) - {"nvidia-cap1", "nvidia-cap2"})  # these two are always there
    except OSError:
        return False


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LONGEST_CONF)
    except OSError:
        return ""
