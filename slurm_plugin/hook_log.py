"""Write what the hooks of a node see and do, one line each: to /var/log/jit-ckpt.log, or to the system's log.

Rule: it raises nothing; a hook that cannot write its log goes on.
"""

from __future__ import annotations

import os
import stat
import time
from typing import Final

from slurm_plugin.evidence import one_line

LOG: Final = "/var/log/jit-ckpt.log"
LONGEST: Final = 1000  # characters of one line


def write(hook: str, text: str, path: str = LOG) -> None:
    """Add one line: time, hook, text."""
    line = one_line(text, LONGEST)
    if _append(path, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {hook}: {line}\n"):
        return
    import syslog  # here: the ordinary case does not need it

    syslog.openlog("jit-ckpt", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_NOTICE, f"{hook}: {line}")


def _append(path: str, line: str) -> bool:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o644)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
                return False
            return os.write(file, line.encode("ascii", "replace")) == len(line)
        finally:
            os.close(file)
    except OSError:
        return False
