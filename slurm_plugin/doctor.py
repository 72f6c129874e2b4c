"""`jit-ckpt doctor`: look at this cluster with the eyes of jit-ckpt, and say what to change and why. The wiring.

Rule 1: run by anybody on a submit host or a node; it changes nothing, and only --probe submits a job.
Rule 2: every look has a deadline; what could not be looked at is said, not guessed.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

from slurm_plugin import examine, inspect_host, judge, observe, plugstack
from slurm_plugin import site as site_file
from slurm_plugin.built_for import built_for
from slurm_plugin.findings import Finding, exit_code, to_json, to_text
from slurm_plugin.probe import ProbeError, probe
from slurm_plugin.slurm import SEARCH_PATH, run_command
from slurm_plugin.slurm_text import SlurmError

PATIENCE: Final = 15.0  # seconds for one of Slurm's commands
WAIT: Final = 600.0  # seconds for the probe's job to start and end
DIRECTORY: Final = "jit-ckpt"  # the option's default, below the working directory

EPILOG: Final = """\
Exit codes: 0 fine, 1 problems, 2 something could not be checked.
What follows `--` is given to sbatch: jit-ckpt doctor --probe -- -p debug -A project"""


def main(arguments: Sequence[str]) -> int:
    """Run `doctor`, the first word of `arguments`."""
    words = list(arguments[1:])
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    options.sbatch = words[cut + 1 :]
    if options.sbatch and not options.probe:
        print("jit-ckpt doctor: options for sbatch need --probe", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the probe's job is cancelled, its folder removed
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
    try:
        findings, facts = examine_all(options)
    except KeyboardInterrupt:
        print("jit-ckpt doctor: interrupted; nothing is left behind", file=sys.stderr)
        return 130
    print(to_json(findings, facts) if options.json else to_text(findings))
    return exit_code(findings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jit-ckpt doctor", description="Check this cluster for jit-ckpt.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--probe", action="store_true", help="submit a job of two nodes that kills one of its ranks")
    parser.add_argument(
        "--dir", metavar="DIR", help="the directory for checkpoints (default: the site's, or ./jit-ckpt)"
    )
    parser.add_argument("--python", metavar="PATH", help="the Python of the jobs (default: that of this shell)")
    parser.add_argument("--conf", metavar="PATH", help="the site's file (default: the plugin's)")
    parser.add_argument(
        "--wait", metavar="S", type=float, default=WAIT, help="seconds for the probe (default: %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def examine_all(options: argparse.Namespace) -> tuple[list[Finding], dict[str, object]]:
    """Look at everything; return the findings, and the raw results of the probe."""
    version, config_text = _ask("sbatch", "--version"), _ask("scontrol", "show", "config")
    config = examine.parse_config(config_text or "")
    findings = [*examine.slurm(version or "no answer", config), *examine.clock(config_text or "", time.time())]
    help_text = _ask("sbatch", "--help")
    named = config.get("PlugStackConfig")
    lines = plugstack.read(named) if named else plugstack.first(os.environ)
    stack = None if lines is None else "\n".join(line.text for line in lines)
    binary = observe.library(stack or "", plugstack.LIBRARY)
    findings += examine.plugin(help_text, stack, built_for(binary or b""), version or "")
    findings += examine.hooks(config, plugstack.text) if config else []
    conf = options.conf or plugstack.site_file(plugstack.arguments(lines or [])[0])
    found = _site(conf)
    site = found if isinstance(found, site_file.Site) else site_file.Site()
    findings += examine.settings(config, version or "", expedite=site.expedite)
    findings += examine.environment(os.environ)
    findings += examine.site(conf, found, config)
    scontrol = shutil.which("scontrol"), shutil.which("scontrol", path=SEARCH_PATH)
    findings += inspect_host.commands(*scontrol, SEARCH_PATH)
    findings += inspect_host.hook_python(site.python, observe.modules(site.python))
    python = options.python or shutil.which("python") or shutil.which("python3") or sys.executable
    findings += inspect_host.job_python(python, observe.modules(python))
    directory = os.path.abspath(options.dir or pattern(site))
    folder = observe.folder(directory)
    findings += inspect_host.directory(folder)
    facts: dict[str, object] = {}
    if options.probe:
        loaded = help_text is not None and "--jit-ckpt" in help_text
        facts["probe"] = _probe(
            options, directory, python, loaded, findings, config.get("MpiDefault", ""), folder.offset
        )
    return findings, facts


def _probe(
    options: argparse.Namespace,
    directory: str,
    python: str,
    loaded: bool,
    findings: list[Finding],
    default: str,
    offset: float,
) -> Mapping[str, Any]:
    try:
        results = probe(directory, python, loaded=loaded, sbatch=options.sbatch, wait=options.wait, say=_say)
    except ProbeError as error:
        findings.append(Finding("probe", "unknown", str(error)))
        return {}
    findings += judge.judge(results, default or "none", offset)
    return results


def pattern(site: site_file.Site) -> str:
    """The directory that a job of this user gets; the job's id is not known yet."""
    whole = site.option.get("dir", DIRECTORY).replace("%u", _user())
    return os.path.dirname(whole.partition("%j")[0]) if "%j" in whole else whole  # the job makes what is below


def _user() -> str:
    """The name that sbatch puts for %u, whatever USER says; it refuses a user without one."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _site(path: str) -> site_file.Site | str:
    try:
        return site_file.read(path)
    except site_file.SiteError as error:
        return str(error)


def _ask(*command: str) -> str | None:
    try:
        return run_command(command, PATIENCE)
    except SlurmError as error:
        _say(str(error))
        return None


def _say(text: str) -> None:
    print(f"jit-ckpt doctor: {text}", file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
