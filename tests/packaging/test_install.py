"""INSTALL.md, followed to the letter on two fresh machines: every block of `sh`, in order, where it says."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from testbed.settings import USER
from tests.packaging.conftest import REPO
from tests.packaging.site import Machine, torch_environment, wait_idle

TEXT = (REPO / "INSTALL.md").read_text(encoding="utf-8")
BLOCK_TIMEOUT = 240.0  # seconds; the longest starts four interpreters with torch
CONFIGURATION = (Path("etc/slurm/slurm.conf"), Path("etc/slurm/plugstack.conf"))


@dataclass(frozen=True)
class Block:
    """Commands of INSTALL.md: the heading they stand under, where they are typed, and their text."""

    heading: str
    where: str
    text: str


def blocks(text: str) -> Iterator[Block]:
    """Every block of `sh`, in order."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = part.partition("\n")[0]
        for where, body in re.findall(r"^```sh\n# ([^\n]*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL):
            yield Block(heading, where, body)


BLOCKS = tuple(blocks(TEXT))


def follow(block: Block, site: tuple[Machine, ...]) -> None:
    """Type a block; a command that fails ends the test."""
    hosts = {"every host": site, "every node": site, "controller": site[:1], "a user, on a login host": site[:1]}
    user = USER if "a user" in block.where else "root"
    cwd = f"/home/{user}" if user != "root" else "/root"
    for one in hosts[block.where]:
        one.run("bash", "-euc", block.text, user=user, cwd=cwd, timeout=BLOCK_TIMEOUT)


def test_no_block_is_left_out() -> None:
    """Every fenced block of INSTALL.md is one that is followed here."""
    assert TEXT.count("```sh\n") == len(BLOCKS) == TEXT.count("```") // 2
    assert {b.where for b in BLOCKS} == {
        "build host",
        "every host",
        "every node",
        "controller",
        "a user, on a login host",
    }


def test_followed_to_the_letter(site: tuple[Machine, ...], deb: Path) -> None:
    """After the canary a killed rank's job has gone on; site-wide the hooks run; after the removal nothing is left."""
    first = site[0]
    for one in site:
        (one.root / "home" / USER).mkdir(exist_ok=True)
    torch_environment(first, Path(sys.executable).resolve(), Path(sys.prefix))
    before = [one.files() for one in site]
    for block in BLOCKS:
        if block.where == "build host":
            assert block.text == "make deb\n"  # done by the fixture `deb`
            for one in site:
                shutil.copy(deb, one.root / "root" / deb.name)
            continue
        follow(block, site)
        if "restart" in block.text and block.where == "every node":
            wait_idle(first)
        if block.heading == "Site-wide" and "restart slurmd" in block.text:
            hooks_run(first)
    canary = (first.root / "home" / USER / "canary" / "canary.out").read_text(encoding="utf-8")
    assert "jit-srun: relaunch: " in canary
    assert (first.root / "home" / USER / "canary" / "final.json").exists(), "training ended"
    for one, files in zip(site, before, strict=True):
        assert one.files() - files == {f"root/{deb.name}"}
    assert first.run("srun", "-N2", "-p", "canary", "hostname").stdout.split() != [], "Slurm is as it was"


def hooks_run(first: Machine) -> None:
    """Run a job: prolog and epilog look at its nodes, leave them idle, and leave nothing of the job in the spool."""
    check = first.root / "etc/jit-ckpt/checks.d/seen"
    check.write_text('#!/bin/sh\necho "$JIT_CKPT_HOOK" >>/var/log/seen\n', encoding="utf-8")
    check.chmod(0o755)
    spool = first.root / "var/spool/jit-ckpt"
    before = set(spool.glob("[0-9]*"))  # of jobs before there was an epilog
    first.run("srun", "-N2", "--jit-ckpt", "hostname", user=USER, cwd=f"/home/{USER}")
    wait_idle(first)
    assert {"prolog", "epilog"} <= set((first.root / "var/log/seen").read_text(encoding="utf-8").split())
    assert set(spool.glob("[0-9]*")) <= before
