"""A disk that fills up in the middle of a file, without a disk: the kernel's limit for the size of files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes; the first part of a write goes through."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
