"""Turn a plugin's shared library into the Slurm version it was built for.

Rule: it is read, not loaded; outside Slurm's programs a plugin does not load.
"""

from __future__ import annotations

import struct
from typing import Final

VERSION: Final = b"plugin_version"  # what SPANK_PLUGIN defines: SLURM_VERSION_NUMBER, 0x160508 for 22.05.8
DYNSYM: Final = 11
HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION: Final = struct.Struct("<IIQQQQIIQQ")
SYMBOL: Final = struct.Struct("<IBBHQQ")


def built_for(library: bytes) -> tuple[int, int] | None:
    """Return (major, minor), for example (22, 5); None when the bytes are no 64-bit plugin."""
    try:
        number = _number(library)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None
    return None if number is None else (number >> 16 & 0xFF, number >> 8 & 0xFF)


def _number(data: bytes) -> int | None:
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    header = HEADER.unpack_from(data)
    at, size, count = header[6], header[11], header[12]
    sections = [SECTION.unpack_from(data, at + size * i) for i in range(count)]
    for _name, kind, _flags, _address, offset, length, link, *_ in sections:
        if kind != DYNSYM:
            continue
        names = sections[link][4]
        for place in range(offset, offset + length, SYMBOL.size):
            name, _info, _other, index, value, _size = SYMBOL.unpack_from(data, place)
            if data[names + name : names + name + len(VERSION) + 1] == VERSION + b"\0":
                home = sections[index]
                return int(struct.unpack_from("<I", data, home[4] + value - home[3])[0])
    return None
