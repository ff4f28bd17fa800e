"""Publishing of checkpoints: a folder is the old one or the new one as a whole, whatever happens in between."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training.checkpoint.test_checkpoints import _filled

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.checkpoint import publishing
from nb_accelerate.training.checkpoint.publishing import Staging, folder_of


def _publish(target: Path, **files: str) -> None:
    staging = Staging.begin(target, "model")
    for name, text in files.items():
        (staging.path / name.replace("__", ".")).write_text(text)
    staging.publish()


def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_new_or_its_files_are_replaced_and_what_else_is_in_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target = tmp_path / "new" / "model"
    _publish(target, model__safetensors="1", pytorch_model__bin="1")
    target.chmod(0o2750)
    _publish(target, model__safetensors="2")
    assert _texts(target) == {"model.safetensors": "2"}
    assert target.stat().st_mode & 0o7777 == 0o2750

    (target / "README.md").write_text("mine")
    _publish(target, pytorch_model__bin="3")
    assert _texts(target) == {"pytorch_model.bin": "3", "README.md": "mine"}

    (target / "README.md").unlink()
    monkeypatch.setattr(os, "link", _refuse)  # as on disks that cannot give a file two names
    _publish(target, model__safetensors="5")
    assert _texts(target) == {"model.safetensors": "5"}

    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    _publish(target, model__safetensors="5")
    monkeypatch.chdir(target)
    _publish(Path(), model__safetensors="6")
    assert Path.cwd() == target
    assert Path("model.safetensors").read_text() == "6"
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_of_a_file_that_several_ranks_have_written_that_of_the_lowest_counts(tmp_path: Path):
    staging = Staging.begin(tmp_path / "state", "state")
    for rank in range(1, 3):
        folder_of(staging.path, rank).mkdir()
        for name in ("both", f"of-{rank}"):
            (folder_of(staging.path, rank) / name).write_text(str(rank))
    staging.join(3)
    staging.publish()
    assert _texts(tmp_path / "state") == {"both": "1", "of-1": "1", "of-2": "2"}


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("not on this disk")


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "disk")
    _publish(tmp_path / "latest", model__safetensors="1")
    assert (tmp_path / "latest").is_symlink()
    assert _texts(tmp_path / "disk") == {"model.safetensors": "1"}


def test_a_folder_in_one_that_is_read_only_is_saved_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "state"
    target.mkdir()
    whole = Path.mkdir

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:  # root may write anywhere, so rights would not do
        if path.parent == tmp_path and not path.exists():
            raise PermissionError(13, "Permission denied", str(path))
        whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    accelerator, model = _filled(1.0)
    accelerator.save_state(target)
    accelerator.save_state(target)
    model.weight.data.fill_(0)
    accelerator.load_state(target)
    assert torch.equal(model.weight, torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"be saved.*other.*Permission denied"):
        accelerator.save_state(tmp_path / "other")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


@pytest.mark.contract("checkpoints: whole or not at all")
@pytest.mark.parametrize("moment", ["before", "after the commit", "in the middle", "at the end"])
def test_a_save_that_ends_in_the_middle_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    where = tmp_path / "state"
    accelerator, model = _filled(1.0)
    accelerator.save_state(where)
    (where / "notes.txt").write_text("mine")
    model.weight.data.fill_(2)
    calls: list[Any] = []

    class Killed(BaseException):
        pass

    def dies_at(number: int, whole: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(args)
            if len(calls) > number:
                raise Killed
            return whole(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "discard", _let_go)  # a process that is killed removes nothing
        patch.setattr(publishing.shutil, "rmtree", lambda *_, **__: None)
        if moment == "before":
            patch.setattr(publishing, "sync", dies_at(0, publishing.sync))
        elif moment == "at the end":
            patch.setattr(publishing, "sync", dies_at(2, publishing.sync))
        else:
            patch.setattr(publishing, "_put_copy", dies_at(2 * (moment == "in the middle"), publishing._put_copy))
        with pytest.raises(Killed):
            accelerator.save_state(where)
    model.weight.data.fill_(3)
    accelerator.load_state(where)
    assert torch.equal(model.weight, torch.full((2, 2), 1.0 if moment == "before" else 2.0))
    model.weight.data.fill_(4)
    accelerator.save_state(where)
    model.weight.data.fill_(5)
    accelerator.load_state(where)
    assert torch.equal(model.weight, torch.full((2, 2), 4.0))
    assert (where / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith(".")) == []  # nothing is left


def _let_go(staging: Staging) -> None:
    if staging._lock is not None:
        os.close(staging._lock)
        staging._lock = None


def test_a_save_that_another_process_is_at_is_left_alone(tmp_path: Path):
    live = f".live{publishing.new_name()}"
    (tmp_path / live).mkdir()
    name = publishing.new_name()
    (tmp_path / f".dead{name}").mkdir()
    elsewhere = f"{int(name[-16:-12], 16) ^ 1:04x}0123456789ab"
    for age in (0, 100_000):  # seconds: of another machine, whose locks are perhaps not seen
        (tmp_path / f".{age}.nb_accelerate-{elsewhere}").mkdir()
        os.utime(tmp_path / f".{age}.nb_accelerate-{elsewhere}", (time.time() - age,) * 2)
    descriptor = os.open(tmp_path / live, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _publish(tmp_path / "model", model__safetensors="1")
    finally:
        os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {live, f".0.nb_accelerate-{elsewhere}", "model"}


def test_what_is_in_the_way_is_said_and_kept(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        Staging.begin(tmp_path / "file", "state")
    (tmp_path / "model" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a folder"):
        _publish(tmp_path / "model", model__safetensors="1")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]
