"""Turn this machine's own settings of apt and pip into those of another root file system on it.

Rule: no mirror or index is named in this project; what this machine uses, the other release uses too.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from testbed.commands import TestbedError

TARGET: Final = "$(REPO_URI) $(RELEASE) $(COMPONENT)"  # for `apt-get indextargets --format`
_APT: Final = re.compile(r"Acquire::(http|https|ftp|Check|Retries|Force|Max)[\w:.-]* .*;", re.ASCII)
_PROXY: Final = re.compile(r'^Acquire::(https?)::Proxy "(\S+)";$', re.MULTILINE)


def mirror(targets: str, codename: str) -> str:
    """Return the address of the archive from which this machine has its own release.

    Args:
        targets: what `apt-get indextargets` printed, one `TARGET` a line.
        codename: this machine's release.

    Raises:
        TestbedError: no such line, because this is no Debian, say.
    """
    for line in targets.splitlines():
        words = line.split()
        if words[1:] == [codename, "main"]:
            return words[0].rstrip("/")
    raise TestbedError(
        f"apt on this machine has no source of {codename or 'a Debian release'} main: no mirror is known"
    )


def apt_conf(dump: str) -> str:
    """Keep of `apt-config dump` what fetching needs: proxies, certificates, time limits, checks of the clock."""
    return "".join(f"{line}\n" for line in dump.splitlines() if _APT.fullmatch(line))


def proxies(dump: str) -> dict[str, str]:
    """Return the proxies of `apt-config dump` as environment variables, for programs other than apt."""
    return {f"{scheme}_proxy": value for scheme, value in _PROXY.findall(dump) if value != "DIRECT"}


def pip_files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Return the files that configure pip here, and those that they and PIP_* name (certificates, constraints)."""
    own = [Path(environ["PIP_CONFIG_FILE"])] if "PIP_CONFIG_FILE" in environ else []
    own += [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    own += [home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
    files = [*own, *_named(environ, own)]
    return [path for path in dict.fromkeys(files) if path.is_file()]


def pip_folders(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Return the folders of packages on this machine that pip is told to look into."""
    found = {p for p in _named(environ, pip_files(environ, home)) if p.is_dir()}
    return sorted(p for p in found if p != Path("/") and not found & set(p.parents))


def _named(environ: Mapping[str, str], files: Iterable[Path]) -> Iterator[Path]:
    values = [value for key, value in environ.items() if key.startswith("PIP_")]
    for file in files:
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            parser.read(file, encoding="utf-8")
        except configparser.Error:
            continue  # pip itself will say so
        values += [value for name in parser.sections() for value in parser[name].values()]
    for word in " ".join(values).split():
        if word.startswith("file:///"):
            yield Path(word.removeprefix("file://")).parent  # an index points to files beside it
        elif word.startswith("/"):
            yield Path(word)
