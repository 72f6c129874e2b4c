"""The checkpoint directory at submission; that an unwritable one is refused needs a user: test_allocator.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Prepare = Callable[..., str]


def test_made_private(prepare: Prepare, tmp_path: Path) -> None:
    """A missing directory is made with mode 0700, one that is there keeps its mode."""
    assert prepare(tmp_path / "new") == ""
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o700
    (tmp_path / "old").mkdir(mode=0o755)
    assert prepare(tmp_path / "old") == ""
    assert (tmp_path / "old").stat().st_mode & 0o7777 == 0o755


def test_link_to_a_directory(prepare: Prepare, tmp_path: Path) -> None:
    """The user's own links are followed."""
    (tmp_path / "link").symlink_to(tmp_path)
    assert prepare(tmp_path / "link") == ""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no/such/place", "cannot create directory '{}': No such file or directory"),
        ("file", "cannot use directory '{}': Not a directory"),
        ("dangling", "cannot use directory '{}': No such file or directory"),
    ],
)
def test_refused(prepare: Prepare, tmp_path: Path, path: str, words: str) -> None:
    """What cannot become a directory is refused with path and reason."""
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    assert prepare(tmp_path / path).startswith(words.format(tmp_path / path))


def test_the_jobs_own_part_is_left_to_the_job(prepare: Prepare, tmp_path: Path) -> None:
    """From the component with %j on nothing is made; what is before it must be there and writable."""
    assert prepare(tmp_path / "user" / "run-%j" / "ck") == ""
    assert [p.name for p in tmp_path.rglob("*")] == ["user"]
    assert prepare(tmp_path / "no" / "such" / "%j").startswith("cannot create directory")
    assert prepare(Path("/%j")) == ("" if os.geteuid() == 0 else "cannot write to directory '/'")


def test_only_looked_at(prepare: Prepare, tmp_path: Path) -> None:
    """A directory that the site's wish alone would make is not made before the job needs it."""
    assert prepare(tmp_path / "later", make=False) == ""
    assert list(tmp_path.iterdir()) == []
    assert prepare(tmp_path / "no" / "later", make=False).startswith(f"cannot use directory '{tmp_path}/no'")
    (tmp_path / "file").touch()
    assert "Not a directory" in prepare(tmp_path / "file", make=False)
