"""Turn the site's file and the user's environment into what a submission gets, and where each value comes from.

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

from slurm_plugin import contract
from slurm_plugin.site import Site, SiteError, read

GOOD, WRONG = 0, 1
DEFAULT: Final = "default"
DIRECTORY: Final = f"./{contract.OPTION}"  # where the user submits


class Row(NamedTuple):
    """One key as it counts, and where it was said."""

    key: str
    value: str
    origin: str


def effective(site: Site, environ: Mapping[str, str], path: str = contract.SITE) -> list[Row]:
    """Return the option's keys in the contract's order, then the site's own.

    Raises:
        contract.OptionError: SBATCH_JIT_CKPT cannot be used, or asks for more than the site allows.
    """
    wishes = environ.get(contract.ENV_WISHES)
    asked = _asked(wishes)
    usual = dict(item.split("=", 1) for item in contract.format_options(contract.Options(dir=DIRECTORY)).split(","))
    rows = []
    for key in contract.ALLOWED:
        row = _option_row(key, asked, site, usual, path)
        rows.append(_limited(row, site, path))
    for key, (_, kind, _, _) in contract.SITE_ALLOWED.items():
        if key in site.given:
            rows.append(_from_file(key, site, path))
        else:
            rows.append(Row(key, _written(getattr(site, key.replace("-", "_")), kind), DEFAULT))
    if wishes is not None:
        said = contract.OFF if wishes == contract.OFF else "on"
        rows = [Row("enable", said, contract.ENV_WISHES) if row.key == "enable" else row for row in rows]
    return [row for row in rows if row.value or row.origin != DEFAULT]


def main(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run `jit-ckpt config`; `argv` begins with the command's own name."""
    about = "Show what a job submitted here gets: the site's file, SBATCH_JIT_CKPT, and defaults."
    parser = argparse.ArgumentParser(prog=f"jit-ckpt {argv[0]}", description=about)
    parser.add_argument("--conf", default=contract.SITE, metavar="PATH", help=f"the site's file ({contract.SITE})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv[1:])
    try:
        rows = effective(read(options.conf), environ, options.conf)
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


def _option_row(key: str, asked: Mapping[str, str], site: Site, usual: Mapping[str, str], path: str) -> Row:
    if key in asked:
        return Row(key, asked[key], contract.ENV_WISHES)
    return _from_file(key, site, path) if key in site.given else Row(key, usual.get(key, ""), DEFAULT)


def _from_file(key: str, site: Site, path: str) -> Row:
    return Row(key, site.given[key].value, f"{path}:{site.given[key].line}")


def _limited(row: Row, site: Site, path: str) -> Row:
    limit = site.given.get(contract.LIMITS.get(row.key, ""))
    if limit is None or int(row.value) <= int(limit.value):
        return row
    if row.origin == contract.ENV_WISHES:
        raise contract.OptionError(f"key {row.key!r} is {row.value!r}: this site allows at most {limit.value}")
    return Row(row.key, limit.value, f"{path}:{limit.line}")


def _written(value: object, kind: str) -> str:
    if kind == "SWITCH":
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
