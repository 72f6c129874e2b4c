"""slurm_plugin/site.py: the administrator's file; that C accepts the same is tested in tests/spank."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from slurm_plugin import contract
from slurm_plugin.site import LONGEST, Given, Site, SiteError, parse, read

FULL = """\
# Our cluster.
enable = gpu, gpu-long      # two partitions
default-partition=gpu
  dir = /scratch/%u/ck#1
keep = 3
max-keep = 5
adds-spares = on
shim = off
checks = gpu,mounts
mounts = /scratch , /home
check-patience = 2.5
drain = off
suspect-threshold = 3
"""


def test_a_file_is_read() -> None:
    """Values have their types, defaults of the option stay as written, and the file's lines are remembered."""
    site = parse(FULL.encode())
    assert site.enable == ("gpu", "gpu-long")
    assert site.option == {"dir": "/scratch/%u/ck#1", "keep": "3"}
    assert (site.max_keep, site.max_requeues) == (5, 1000)
    assert (site.adds_spares, site.shim, site.drain) == (True, False, False)
    assert (site.checks, site.mounts) == (("gpu", "mounts"), ("/scratch", "/home"))
    assert (site.check_patience, site.suspect_threshold, site.python) == (2.5, 3, "/usr/bin/python3")
    assert site.given["keep"] == Given("3", 5)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", " \t# nothing"])
def test_nothing_said_means_the_defaults(text: str) -> None:
    """An empty file is as good as none."""
    assert parse(text.encode()) == Site()


WRONG = [
    ("kep = 3", "cannot use key 'kep': unknown; allowed keys: enable, "),
    ("resume = /d/m3-r0", "cannot use key 'resume': unknown"),
    ("keep", "cannot use key 'keep': it needs a value: a whole number from 1 to 1000"),
    ("keep = # three", "cannot use key 'keep': it needs a value"),
    ("keep = 0", "cannot use key 'keep' with value '0'; allowed: a whole number from 1 to 1000"),
    ("drain = yes", "cannot use key 'drain' with value 'yes'; allowed: on or off"),
    ("enable = on,gpu", "cannot use key 'enable'"),
    ("enable = gpu,,cpu", "cannot use key 'enable'"),
    ("enable = two words", "cannot use key 'enable'"),
    ("python = python3", "cannot use key 'python' with value 'python3'; allowed: an absolute path"),
    ("mounts = /a,b", "cannot use key 'mounts'"),
    ("dir = /a,b", "cannot use key 'dir'"),
    ("check-patience = 61", "cannot use key 'check-patience'"),
    ("spool-free = 1.5", "cannot use key 'spool-free'"),
    ("dir = /a\r", "cannot use key 'dir' with value '/a?'"),
    ("dir = /" + "a" * 4095, "cannot use key 'dir': longer than 4095 bytes"),
    ("shim = on\0", "it holds a null byte"),
    ("max-keep = 1\nmax-keep = 1", "cannot use key 'max-keep': it is in line 2 already"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    """File, line, key and what is allowed are in one printable line."""
    with pytest.raises(SiteError) as caught:
        parse(f"\n{text}\nkeep = nothing read after it".encode(), "/etc/x.conf")
    said = str(caught.value)
    assert said.startswith(
        f"/etc/x.conf:{2 + text.count(chr(10))}: {words}" if "null" not in words else "/etc/x.conf:2"
    )
    assert words in said
    assert said.isprintable()


def test_bytes_that_are_no_text() -> None:
    """A path is bytes to the kernel; a key of such bytes is unknown, and said in printable text."""
    assert os.fsencode(parse(b"dir = /a\xff").option["dir"]) == b"/a\xff"
    with pytest.raises(SiteError, match="unknown"):
        parse(b"\xff = 1")


def test_a_missing_file_means_the_defaults(tmp_path: Path) -> None:
    """A site need not have one."""
    assert read(str(tmp_path / "none.conf")) == Site()


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Root runs by it: group or others that may write, a folder, a FIFO, a monster are refused and nothing hangs."""
    path = tmp_path / "jit-ckpt.conf"
    path.write_text("keep = 3\n")
    path.chmod(0o644)
    assert read(str(path)).option == {"keep": "3"}
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(SiteError, match="others than root can write it"):
            read(str(path))
    path.write_bytes(b"#" * (LONGEST + 1))
    path.chmod(0o644)
    with pytest.raises(SiteError, match=f"longer than {LONGEST} bytes"):
        read(str(path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for other in (tmp_path, fifo):
        with pytest.raises(SiteError, match="not a file"):
            read(str(other))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Its owner could change it."""
    path = tmp_path / "jit-ckpt.conf"
    path.touch(0o644)
    os.chown(path, 65534, 65534)
    with pytest.raises(SiteError, match="cannot trust it"):
        read(str(path))


def test_every_key_has_its_attribute() -> None:
    """Each key of the contract is an attribute of Site with a default."""
    assert {key.replace("-", "_") for key in contract.SITE_ALLOWED} == set(Site.__dataclass_fields__) - {
        "option",
        "given",
    }


def test_the_sample_file_shows_every_key_with_its_default() -> None:
    """packaging/jit-ckpt.conf: as it is it says nothing; its commented keys are all there are, with their defaults."""
    sample = (Path(__file__).parents[2] / "packaging" / "jit-ckpt.conf").read_bytes()
    assert parse(sample) == Site()
    shown = parse(re.sub(rb"^#([a-z-]+ = )", rb"\1", sample, flags=re.MULTILINE))
    assert shown.given.keys() == contract.SITE_ALLOWED.keys() | contract.ALLOWED.keys() - {"resume"}
    text = ",".join(f"{key}={value}" for key, value in shown.option.items())
    assert contract.parse_options(text) == contract.Options(dir=contract.OPTION)
    examples = {"default_partition", "mounts"}  # those have no default to show
    for name in set(Site.__dataclass_fields__) - {"option", "given"} - examples:
        assert getattr(shown, name) == getattr(Site(), name), name
