"""Turn the site's file, the plugin's arguments and the user's environment into what a submission gets, and from where.

`jit-ckpt config`; the same layers and limits as sbatch has (spank/request.c), below its command line.

Rule: standard library only, because administrators run it with the cluster's own python3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from slurm_plugin import contract, plugstack
from slurm_plugin.site import Site, SiteError, argument, read

GOOD, WRONG = 0, 1
DEFAULT: Final = "default"
DIRECTORY: Final = f"./{contract.OPTION}"  # where the user submits


class Row(NamedTuple):
    """One key as it counts, and where it was said."""

    key: str
    value: str
    origin: str


def effective(
    site: Site, environ: Mapping[str, str], path: str = contract.SITE, words: Sequence[str] = (), place: str = ""
) -> list[Row]:
    """Return the option's keys in the contract's order, then the site's own.

    Args:
        path: of the site's file.
        words, place: the plugin's arguments, which win over the file, and where they are.

    Raises:
        SiteError: the plugin refuses one of its arguments.
        contract.OptionError: SBATCH_JIT_CKPT cannot be used, or asks for more than the site allows.
    """
    wishes = environ.get(contract.ENV_WISHES)
    asked = _asked(wishes)
    usual = dict(item.split("=", 1) for item in contract.format_options(contract.Options(dir=DIRECTORY)).split(","))
    said = {key: Row(key, one.value, f"{path}:{one.line}") for key, one in site.given.items()}
    said |= _arguments(words, place)
    rows = []
    for key in contract.ALLOWED:
        row = Row(key, asked[key], contract.ENV_WISHES) if key in asked else said.get(key)
        rows.append(_limited(row or Row(key, usual.get(key, ""), DEFAULT), said))
    for key, (_, kind, _, _) in contract.SITE_ALLOWED.items():
        rows.append(said.get(key) or Row(key, _written(getattr(site, key.replace("-", "_")), kind), DEFAULT))
    if wishes is not None:
        on = contract.OFF if wishes == contract.OFF else "on"
        rows = [Row("enable", on, contract.ENV_WISHES) if row.key == "enable" else row for row in rows]
    return [row for row in rows if row.value or row.origin != DEFAULT]


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run `jit-ckpt config`; `argv` begins with the command's own name."""
    about = "Show what a job submitted here gets: plugstack.conf, the site's file, SBATCH_JIT_CKPT, and defaults."
    parser = argparse.ArgumentParser(prog=f"jit-ckpt {argv[0]}", description=about)
    parser.add_argument("--conf", metavar="PATH", help="the site's file (default: the one that the plugin reads)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv[1:])
    words, place = plugstack.arguments(plugstack.first(environ))
    conf = options.conf or plugstack.site_file(words)
    try:
        rows = effective(read(conf), environ, conf, words, place)
    except SiteError as error:
        print(f"jit-ckpt: {error}", file=sys.stderr)
        return WRONG
    except contract.OptionError as error:
        print(f"jit-ckpt: {contract.ENV_WISHES}: {error}", file=sys.stderr)
        return WRONG
    if options.json:
        print(json.dumps({row.key: {"value": row.value, "from": row.origin} for row in rows}, indent=2))
    else:
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        for row in rows:
            print(f"{row.key:<{widths[0]}}  {row.value:<{widths[1]}}  {row.origin}")
    return GOOD


def _asked(wishes: str | None) -> dict[str, str]:
    if wishes is None or wishes == contract.OFF:
        return {}
    contract.parse_options(f"dir=/,{wishes}")
    return dict(item.split("=", 1) for item in wishes.split(",") if item)


def _arguments(words: Sequence[str], place: str) -> dict[str, Row]:
    rows = {}
    for word in words:
        if word.startswith((plugstack.CONF, plugstack.SHIM)):
            continue
        try:
            key, value = argument(word)
        except ValueError as error:
            raise SiteError(f"{place}: {error}") from None
        rows[key] = Row(key, value, place)
    return rows


def _limited(row: Row, said: Mapping[str, Row]) -> Row:
    limit = said.get(contract.LIMITS.get(row.key, ""))
    if limit is None or int(row.value) <= int(limit.value):
        return row
    if row.origin == contract.ENV_WISHES:
        raise contract.OptionError(f"key {row.key!r} is {row.value!r}: this site allows at most {limit.value}")
    return Row(row.key, limit.value, limit.origin)


def _written(value: object, kind: str) -> str:
    if kind == "SWITCH":
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
