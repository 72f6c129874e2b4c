"""README.md: what it tells people to type, set and open is there."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

from slurm_plugin import contract

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_make_command_is_a_target() -> None:
    """`make X` in the README is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*)\s*:(?!=)", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", README))
    assert {"demo", "test"} <= named
    assert named <= targets


def test_every_make_command_is_run_by_something() -> None:
    """What the README tells to make is run by CI or by a test, or takes so long that people run it; the rest of its
    commands are typed by tests/slurm/test_readme.py."""
    by_hand = {"demo", "bench", "test-on"}  # minutes each, and another release of Debian
    run = re.findall(r"\bmake ([a-z][\w-]*)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    for test in (ROOT / "tests" / "packaging").glob("*.py"):
        run += re.findall(r'\bmake\("([a-z][\w-]*)"', test.read_text(encoding="utf-8"))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", README)) - by_hand <= set(run)


def test_every_path_exists() -> None:
    """Folders and files that the README names are in the tree."""
    text = re.sub(r"build/\S*", "", README)
    named = set(re.findall(r"`([\w/.-]+/)`", text)) | set(re.findall(r"\w+/[\w/-]+\.\w+|\b[A-Z]+\.md", text))
    assert {"testbed/", "docs/protocol.md", "sbatch_templates/ddp.sbatch"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_table_of_options_is_the_contract() -> None:
    """Every key of `--jit-ckpt` has its row, in the contract's order and default; sbatch sets that of `dir`."""
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (\S*) ?\|", README.partition("| key |")[2].partition("\n\n")[0], re.M))
    assert list(rows) == list(contract.ALLOWED)
    for field in fields(contract.Options):
        default = "./jit-ckpt" if field.default is MISSING else field.default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert rows[field.name.replace("_", "-")] == shown


def test_every_command_is_installed_by_the_package() -> None:
    """jit-ckpt and jit-srun are scripts of the project."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    named = set(re.findall(r"`(jit-\w+)", README))
    assert {"jit-ckpt", "jit-srun"} == named
    assert named <= scripts.keys()


def test_templates_leave_the_option_to_the_command_line() -> None:
    """sbatch_templates/README.md: without the option they run as plain jobs; and what is typed replaces a line."""
    for template in (ROOT / "sbatch_templates").glob("*.sbatch"):
        text = template.read_text(encoding="utf-8")
        assert f"#SBATCH --{contract.OPTION}" not in text, template
        assert re.search(rf"^# .*  sbatch --{contract.OPTION}(=\S+)? {template.name} ", text, re.MULTILINE), template
