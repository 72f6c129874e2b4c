"""docs/man: the manual pages name everything that can be typed, set or seen."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jitmpi import cli
from slurm_plugin import contract, relaunch, site

MAN = Path(__file__).resolve().parents[2] / "docs" / "man"
PAGES = ("jit-ckpt.1", "jit-srun.1", "jit-ckpt.conf.5", "spank-jit-ckpt.8")


def page(name: str) -> str:
    """The page as a reader sees it, without bold, on one line."""
    command = ["mandoc", "-Tascii", "-O", "width=1000", str(MAN / name)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return re.sub(r".\x08", "", text)


def told(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """What a command of jit-ckpt says of itself."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_clean(name: str) -> None:
    """mandoc finds nothing wrong with a page, and there are no others."""
    done = subprocess.run(["mandoc", "-Tlint", "-W", "warning", MAN / name], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "")
    assert {path.name for path in MAN.iterdir()} == set(PAGES)


def test_every_command_and_option_of_jit_ckpt(capsys: pytest.CaptureFixture[str]) -> None:
    """jit-ckpt(1) has each command in its synopsis and list, and each option that its --help has."""
    synopsis, _, description = page("jit-ckpt.1").partition("DESCRIPTION")
    assert set(re.findall(r"^ +jit-ckpt ([a-z]+)", synopsis, re.MULTILINE)) == set(cli.COMMANDS)
    assert set(cli.COMMANDS) <= set(re.findall(r"^ +([a-z-]+)\b", description, re.MULTILINE))
    for command in cli.COMMANDS:
        options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", told(capsys, command).partition("options:")[2]))
        assert "--help" in options
        assert not {name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", description)}, command


def test_every_option_and_code_of_jit_srun() -> None:
    """jit-srun(1) has what --help has, every variable that jit-srun sets, and its exit codes."""
    shown = page("jit-srun.1")
    named = {*re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", relaunch.USAGE)} - {"--jit-ckpt"}
    named |= {*relaunch.VARIABLES, *contract.NCCL, contract.JOURNAL, contract.ENV_OPTIONS}
    named |= {str(code) for code in (contract.EXIT_COMMITTED, contract.EXIT_LOST, contract.EXIT_REFUSED)}
    assert not {name for name in named if not re.search(rf"(?<![\w-]){name}(?![\w-])", shown)}


def test_every_key_of_the_option() -> None:
    """spank-jit-ckpt(8) has each key in the contract's order, with its bounds and default."""
    shown = page("spank-jit-ckpt.8")
    keys = dict(re.findall(r"^ {5}([a-z-]+)=\S.*\n((?: {10,}.*\n)+)", shown, re.MULTILINE))
    assert list(keys) == list(contract.ALLOWED)
    for key, (_, least, most) in contract.ALLOWED.items():
        text = " ".join(keys[key].split())
        default = contract.Options.__dataclass_fields__[key.replace("-", "_")].default
        if least is not None and most is not None:
            assert f", {least} to {most}" in text or f" {least} to {most}." in text, key
        if isinstance(default, int | float):
            assert f"Default: {default:g}." in text, key


def test_every_name_of_the_contract() -> None:
    """spank-jit-ckpt(8) has the variables and files that an administrator meets."""
    shown = page("spank-jit-ckpt.8")
    for name in (contract.ENV_OPTIONS, contract.ENV_OPTIONS_JOB, contract.ENV_OPTIONS_HOOK, contract.SPOOL):
        assert name in shown


def test_every_key_of_the_site_s_file() -> None:
    """jit-ckpt.conf(5) has each key of the file, with its bounds and default."""
    shown = page("jit-ckpt.conf.5")
    keys = dict(re.findall(r"^ {5}([a-z-]+) = \S.*\n((?: {10,}.*\n)+)", shown, re.MULTILINE))
    assert keys.keys() - contract.ALLOWED.keys() == contract.SITE_ALLOWED.keys()
    assert not {key for key in contract.ALLOWED if not re.search(rf"(?<![\w-]){key}(?![\w-])", shown)}
    for key, (_, kind, least, most) in contract.SITE_ALLOWED.items():
        text = " ".join(keys[key].split())
        default = getattr(site.Site(), key.replace("-", "_"))
        if kind == "NUMBER":
            assert f"{least} to {most}" in text, key
        if kind in ("NUMBER", "WHOLE"):
            assert f"Default: {default:g}." in text, key
        if kind == "ABSOLUTE":
            assert f"Default: {default}." in text, key
