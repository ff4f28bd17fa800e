"""The folder for long output: this user's alone, and emptied in time."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from nb_accelerate.notebook.ranks.output import logs
from nb_accelerate.notebook.ranks.output.logs import new_log


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def usual(folder: Path) -> Path:
    return folder / f"nb_accelerate-logs-{os.getuid()}"


def write_log() -> Path:
    path, file = new_log()
    with file:
        file.write("a line\n")
    assert path.read_text() == "a line\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.is_symlink()
    return path


def test_logs_share_a_folder(usual: Path) -> None:
    first, second = write_log(), write_log()
    assert first != second
    assert first.parent == second.parent == usual


def test_a_folder_of_ours_that_others_could_read_is_closed_to_them(usual: Path) -> None:
    usual.mkdir()
    usual.chmod(0o777)
    assert write_log().parent == usual


def test_a_link_where_the_folder_should_be_is_not_followed(folder: Path, usual: Path) -> None:
    (folder / "elsewhere").mkdir()
    usual.symlink_to(folder / "elsewhere")
    first, second = write_log(), write_log()
    assert first.parent == second.parent != usual
    assert list((folder / "elsewhere").iterdir()) == []


def test_a_file_where_the_folder_should_be_is_left_alone(usual: Path) -> None:
    usual.write_text("mine")
    write_log()
    assert usual.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to somebody else")
def test_a_folder_of_another_user_is_not_used(folder: Path, usual: Path) -> None:
    for planted in (usual, folder / f"{usual.name}-planted"):
        planted.mkdir()
        planted.chmod(0o777)
        os.chown(planted, 12345, -1)
    log = write_log()
    assert log.parent not in (usual, folder / f"{usual.name}-planted")
    assert write_log().parent == log.parent
    assert list(usual.iterdir()) == []


def test_old_logs_are_removed_and_nothing_else(folder: Path, usual: Path) -> None:
    kept, old = write_log(), write_log()
    other = usual / "notes.txt"
    other.touch()
    outside = folder / "outside.log"
    outside.touch()
    (usual / "link.log").symlink_to(outside)
    long_ago = time.time() - logs._MAX_AGE - 60
    for path in (old, other, outside):
        os.utime(path, (long_ago, long_ago))
    os.utime(usual / "link.log", (long_ago, long_ago), follow_symlinks=False)
    new = write_log()
    assert set(usual.iterdir()) == {kept, new, other}
    assert outside.exists()
