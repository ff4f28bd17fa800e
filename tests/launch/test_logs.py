"""Logs for long output: this user's alone, and removed in time."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from nb_accelerate.notebook.ranks.output import sinks
from nb_accelerate.notebook.ranks.output.sinks import new_log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def write_log() -> Path:
    path, file = new_log()
    with file:
        file.write("a line\n")
    return path


def test_each_log_is_new_and_nobody_else_can_read_it(folder: Path) -> None:
    first, second = write_log(), write_log()
    assert {first, second} == set(folder.iterdir())
    assert first.read_text() == "a line\n"
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_old_logs_are_removed_and_nothing_else(folder: Path) -> None:
    kept, old, theirs = write_log(), write_log(), write_log()
    other, link = folder / "notes.log", folder / "nb_accelerate-link.log"
    other.touch()
    link.symlink_to(other)
    long_ago = time.time() - sinks._MAX_AGE - 60
    for path in (old, theirs, other, link):
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    expected = {kept, other}
    if os.geteuid() == 0:
        os.chown(theirs, 12345, -1)
        expected.add(theirs)
    assert {*expected, write_log()} == set(folder.iterdir())
