"""Run one command to its end, with a deadline; the only place where a failing command becomes an error."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

TIMEOUT = 60.0  # seconds; every command of the test bed itself ends in well under one


class TestbedError(Exception):
    """The test bed could not do what it was asked; the message says what, and shows what was printed."""

    __test__ = False  # pytest would take the name for a test class


def run(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command and return it with its output as text (standard error apart).

    Raises:
        TestbedError: it could not start, took longer than `timeout` seconds, or failed while `check` is set.
    """
    shown = " ".join(command)
    try:
        done = subprocess.run(
            list(command),
            text=True,
            errors="replace",
            capture_output=True,
            timeout=timeout,
            env=env,
            check=False,
            input="" if stdin is None else stdin,
        )
    except subprocess.TimeoutExpired as error:
        raise TestbedError(f"{shown}: did not end within {timeout:g} s") from error
    except OSError as error:
        raise TestbedError(f"{shown}: cannot start: {error.strerror}; `make deps` installs what is missing") from error
    if check and done.returncode:
        raise TestbedError(f"{shown}: ended with {done.returncode}\n{done.stderr}{done.stdout}".rstrip())
    return done


def wait_for(what: str, true: Callable[[], bool], timeout: float, pause: float = 0.1) -> None:
    """Wait until `true()` is.

    Raises:
        TestbedError: it was not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise TestbedError(f"{what}: not within {timeout:g} s")
        time.sleep(pause)
