"""testbed/borrowed.py: what another root file system takes over from this machine's apt and pip."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import TestbedError
from testbed.borrowed import apt_conf, mirror, pip_files, pip_folders, proxies

TARGETS = """\
https://packages.example.org/tools stable main
http://mirror.example.org/debian-security/ trixie-security main
http://mirror.example.org/debian/ trixie contrib
http://mirror.example.org/debian/ trixie main
http://other.example.org/debian/ trixie main
"""
DUMP = """\
APT::Architecture "amd64";
Acquire "";
Acquire::http::Proxy "http://proxy.example.org:3128";
Acquire::https::Proxy "DIRECT";
Acquire::Check-Valid-Until "false";
Acquire::Retries "3";
Acquire::Changelogs::URI::Origin::Debian "https://changelogs.example.org/";
DPkg::Pre-Install-Pkgs:: "/usr/sbin/something";
"""


def test_mirror_is_the_machines_own() -> None:
    """The first source of the machine's own release wins, not that of updates, security fixes or anything else."""
    assert mirror(TARGETS, "trixie") == "http://mirror.example.org/debian"


@pytest.mark.parametrize("codename", ["noble", ""])
def test_no_mirror_is_said(codename: str) -> None:
    """On a machine whose sources have nothing of its release no mirror is made up."""
    with pytest.raises(TestbedError, match="no mirror is known"):
        mirror(TARGETS, codename)


def test_apt_conf_keeps_how_to_fetch() -> None:
    """Proxies and checks are taken over; hooks, architecture and other sites' addresses are not."""
    assert [line.split()[0] for line in apt_conf(DUMP).splitlines()] == [
        "Acquire::http::Proxy",
        "Acquire::https::Proxy",
        "Acquire::Check-Valid-Until",
        "Acquire::Retries",
    ]
    assert proxies(DUMP) == {"http_proxy": "http://proxy.example.org:3128"}


def test_pip_finds_what_it_finds_here(tmp_path: Path) -> None:
    """Every file and folder that pip's configuration names is taken over; of an index also the files beside it."""
    wheels, index, certificate = tmp_path / "wheels", tmp_path / "index" / "simple", tmp_path / "ca.crt"
    wheels.mkdir()
    index.mkdir(parents=True)
    certificate.touch()
    conf = tmp_path / ".config" / "pip" / "pip.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f"[global]\nfind-links = {wheels}\nextra-index-url = file://{index} https://pip.example.org/%41\n")
    environ = {"PIP_CERT": str(certificate), "PIP_CONSTRAINT": str(tmp_path / "gone"), "OTHER": str(tmp_path)}
    assert {conf, certificate} <= set(pip_files(environ, tmp_path))
    assert {wheels, index.parent} <= set(pip_folders(environ, tmp_path))
    assert tmp_path not in pip_folders(environ, tmp_path)


def test_a_broken_pip_configuration_is_pips_to_tell(tmp_path: Path) -> None:
    """A file that is no configuration is copied as it is and stops nothing here."""
    conf = tmp_path / "pip.conf"
    conf.write_text("no section\n")
    assert conf in pip_files({"PIP_CONFIG_FILE": str(conf)}, tmp_path)
    pip_folders({"PIP_CONFIG_FILE": str(conf)}, tmp_path)
