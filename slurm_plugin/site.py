"""Turn the text of /etc/jit-ckpt.conf into one `Site`: what the cluster's administrator decided.

    key = value          # a comment begins a line, or follows a blank

Rule 1: it accepts exactly what spank/site.c accepts; tests/spank/test_site.py compares the two on random texts.
Rule 2: a file that cannot be used is refused as a whole, with file, line and key; one that is missing means defaults.
Rule 3: hooks run as root by it, so it counts only if nobody but root, or the reader, can write it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slurm_plugin import contract

LONGEST: Final = 64 << 10  # bytes of a file that a person wrote
LONGEST_VALUE: Final = 4095  # bytes; PATH_MAX without its end

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WHOLE: Final = re.compile(r"[0-9]{1,9}")
_NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class SiteError(Exception):
    """The site's file cannot be used; the text names file, line and key."""


class Given(NamedTuple):
    """One line of the file: the value as it was written, and where."""

    value: str
    line: int


@dataclass(frozen=True)
class Site:
    """What the administrator decided; the defaults are those of a site without a file.

    Attributes:
        enable: ("off",), ("on",), or the partitions whose jobs have the option without asking.
        default_partition: where a job goes that names no partition; "" when that is not said.
        option: the option's keys that have a default of the site's, as they were written.
        max_keep, max_requeues, max_spares: the most that a user may ask for.
        adds_spares: the site's lua adds the spare nodes to the job, so the user does not count them in -N.
        shim: whether plain srun in batch scripts is taken over.
        expedite: whether jobs ask for Slurm's expedited requeue (25.11 and later).
        python: the interpreter of the hooks.
        checks: ("on",), ("off",), or the names of the node checks to run.
        mounts: file systems that a node must have.
        check_patience: seconds for one check.
        checks_dir: the site's own checks.
        drain: whether a bad node is drained.
        suspect_threshold: counted suspicions that drain a node; 0 for never.
        suspect_half_life: hours in which a suspicion loses half its weight.
        spool_free: MiB that the spool's file system must have free.
        given: key -> what the file says, for those who show it.
    """

    enable: tuple[str, ...] = ("off",)
    default_partition: str = ""
    option: Mapping[str, str] = field(default_factory=dict)
    max_keep: int = 1000
    max_requeues: int = 1000
    max_spares: int = 1000
    adds_spares: bool = False
    shim: bool = True
    expedite: bool = False
    python: str = "/usr/bin/python3"
    checks: tuple[str, ...] = ("on",)
    mounts: tuple[str, ...] = ()
    check_patience: float = 5.0
    checks_dir: str = "/etc/jit-ckpt/checks.d"
    drain: bool = True
    suspect_threshold: int = 0
    suspect_half_life: float = 24.0
    spool_free: int = 64
    given: Mapping[str, Given] = field(default_factory=dict)


def read(path: str = contract.SITE) -> Site:
    """Read the site's file; a missing one gives the defaults.

    Raises:
        SiteError: it is malformed, or others than root and the reader can write it.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Site()
    except OSError as error:
        raise SiteError(f"{path}: cannot read it: {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise SiteError(f"{path}: cannot read it: not a file")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            raise SiteError(f"{path}: cannot trust it: others than root can write it")
        text = os.read(file, LONGEST + 1)
    except OSError as error:
        raise SiteError(f"{path}: cannot read it: {error.strerror}") from error
    finally:
        os.close(file)
    return parse(text, path)


def parse(text: bytes, path: str = contract.SITE) -> Site:
    """Read the text of the site's file.

    Raises:
        SiteError: unknown key, bad value, a key given twice.
    """
    if len(text) > LONGEST:
        raise SiteError(f"{path}: cannot read it: longer than {LONGEST} bytes")
    given: dict[str, Given] = {}
    for number, line in enumerate(text.split(b"\n"), 1):
        try:
            item = _item(line)
            if item is None:
                continue
            key, value = item
            if key in given:
                raise ValueError(f"cannot use key '{key}': it is in line {given[key].line} already")
            given[key] = Given(value, number)
        except ValueError as error:
            raise SiteError(f"{path}:{number}: {_plain(str(error))}") from None
    option = {key: one.value for key, one in given.items() if key in contract.ALLOWED}
    own = {key.replace("-", "_"): _typed(key, one.value) for key, one in given.items() if key not in option}
    return Site(option=option, given=given, **own)  # type: ignore[arg-type]


def argument(word: str) -> tuple[str, str]:
    """Read one `key=value` of the plugin's arguments in plugstack.conf.

    Raises:
        ValueError: it is none, or one that the hooks read, and they read the file only.
    """
    item = _item(os.fsencode(word))
    if item is None:
        raise ValueError(f"cannot use {_plain(word)!r}")
    keys = [*contract.SITE_ALLOWED]
    if item[0] in keys[keys.index("python") :]:
        raise ValueError(f"cannot use key '{item[0]}' here: the hooks read the file only")
    return item


def _item(raw: bytes) -> tuple[str, str] | None:
    """Read one line; None for an empty one."""
    if b"\0" in raw:
        raise ValueError("cannot use this line: it holds a null byte")
    line = raw.strip(b" \t")
    if not line or line.startswith(b"#"):
        return None
    comment = re.search(rb"[ \t]#", line)
    line = (line[: comment.start()] if comment else line).rstrip(b" \t")
    name, equals, after = line.partition(b"=")
    key, value = (part.strip(b" \t").decode("utf-8", "surrogateescape") for part in (name, after))
    if key not in contract.SITE_ALLOWED and (key not in contract.ALLOWED or key == "resume"):
        keys = [*contract.SITE_ALLOWED, *(k for k in contract.ALLOWED if k != "resume")]
        raise ValueError(f"cannot use key '{key}': unknown; allowed keys: {', '.join(keys)}")
    allowed = (contract.SITE_ALLOWED.get(key) or contract.ALLOWED[key])[0]
    if not equals or not value:
        raise ValueError(f"cannot use key '{key}': it needs a value: {allowed}")
    if len(after.strip(b" \t")) > LONGEST_VALUE:
        raise ValueError(f"cannot use key '{key}': longer than {LONGEST_VALUE} bytes; allowed: {allowed}")
    if not _fits(key, value):
        raise ValueError(f"cannot use key '{key}' with value '{value}'; allowed: {allowed}")
    return key, value


def _fits(key: str, value: str) -> bool:
    if key in contract.ALLOWED:
        try:
            contract.parse_value(key, value)
        except contract.OptionError:
            return False
        return "," not in value
    _, kind, least, most = contract.SITE_ALLOWED[key]
    match kind:
        case "SWITCH":
            return value in ("on", "off")
        case "NAME":
            return bool(_NAME.fullmatch(value))
        case "NAMES":
            names = _list(value)
            return all(_NAME.fullmatch(name) for name in names) and (len(names) == 1 or not {"on", "off"} & set(names))
        case "ABSOLUTE":
            return _is_absolute(value)
        case "PATHS":
            return all(_is_absolute(path) for path in _list(value))
        case "WHOLE":
            return bool(_WHOLE.fullmatch(value)) and least <= int(value) <= most
        case _:
            return bool(_NUMBER.fullmatch(value)) and least <= float(value) <= most


def _typed(key: str, value: str) -> object:
    match contract.SITE_ALLOWED[key][1]:
        case "SWITCH":
            return value == "on"
        case "NAMES" | "PATHS":
            return _list(value)
        case "WHOLE":
            return int(value)
        case "NUMBER":
            return float(value)
    return value


def _list(value: str) -> tuple[str, ...]:
    return tuple(item.strip(" \t") for item in value.split(","))


def _is_absolute(path: str) -> bool:
    return path.startswith("/") and "," not in path and not _CONTROL.search(path)


def _plain(text: str) -> str:
    """One printable line whatever the file holds."""
    return _CONTROL.sub("?", text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
