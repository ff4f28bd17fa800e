"""Folders of checkpoints: whatever somebody has put into one harms nobody, and numbered ones are kept or go."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn
from training.checkpoint.test_checkpoints import _filled

from nb_accelerate.base.config.project import ProjectConfiguration
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint.model import load_checkpoint_in_model

# --- Folders of others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/{0}/precious", "../../precious", "../precious/../../precious"])
def test_a_list_in_a_folder_deletes_and_moves_nothing(tmp_path: Path, name: str):
    where, precious = tmp_path / "a" / "state", tmp_path / "precious"
    precious.write_text("mine")
    accelerator, model = _filled(1.0)
    accelerator.save_state(where)
    (where / ".incoming-0").mkdir()
    (where / ".incoming-0" / ".complete").write_text(json.dumps([name.format(tmp_path)]))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".complete").write_text("[]")
    (tmp_path / "elsewhere" / "b").write_text("mine")
    (where / ".incoming-1").symlink_to(tmp_path / "elsewhere")
    (where / ".nb_accelerate-state-7").symlink_to(tmp_path / "elsewhere")
    (where / ".nb_accelerate-0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    before = _everything(tmp_path)
    model.weight.data.fill_(5)
    accelerator.load_state(where)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert _everything(tmp_path) == before
    accelerator.save_state(where)
    assert precious.read_text() == "mine"
    assert (tmp_path / "elsewhere" / "b").read_text() == "mine"


def test_names_in_a_manifest_stay_inside_of_the_folder(tmp_path: Path):
    where = tmp_path / "state"
    accelerator, _ = _filled(1.0)
    accelerator.save_state(where)
    whole = json.loads((where / "checkpoint.json").read_text())
    for name in ("/etc/passwd", "../state/optimizer.bin", "a/../../b", "", "a//b", "a\\b", "a\nb"):
        content = {**whole, "files": {**whole["files"], name: {"size": 1, "crc32": []}}}
        del content["crc32"]
        content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        (where / "checkpoint.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"checkpoint\.json.*name of"):
            accelerator.load_state(where)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_links_and_pipes_are_not_read(tmp_path: Path, with_manifest: bool):
    where = tmp_path / "state"
    accelerator, model = _filled(1.0)
    accelerator.save_state(where)
    if not with_manifest:  # as accelerate's
        (where / "checkpoint.json").unlink()
        (where / "random_states_0.pkl").unlink()
    model.weight.data.fill_(5)
    (where / "optimizer.bin").rename(tmp_path / "o")
    (where / "optimizer.bin").symlink_to(tmp_path / "o")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        accelerator.load_state(where)
    (where / "optimizer.bin").unlink()
    os.mkfifo(where / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin"):
        accelerator.load_state(where)
    assert torch.equal(model.weight, torch.full((2, 2), 5.0))


def test_an_index_of_weights_names_files_of_its_folder_only(tmp_path: Path):
    Accelerator(cpu=True).save_model(nn.Linear(2, 2), tmp_path / "other")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"weight": "../other/model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names '\.\./other/model\.safetensors'"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "model")


_NAMES = (
    "model.safetensors", "optimizer.bin", "optimizer_1.bin", "scheduler.bin", "random_states_0.pkl", "checkpoint.json",
    "random_states_1.pkl", "custom_checkpoint_0.pkl", "scaler.pt", "README.md", "mine/w.bin", "pytorch_model.bin",
    ".incoming-0/.complete", ".incoming-x/.complete", ".nb_accelerate-state-1/checkpoint.json", "\x01", "\u202e",
    ".nb_accelerate-state-2/model.safetensors", ".nb_accelerate-0123456789abcdef/rank-0/optimizer.bin",
    ".nb_accelerate-model-3/a",
)  # fmt: skip
_JSON = (
    "", "{", "[]", "null", "0", "[" * 9999, '{"format": 4}', '{"format": 4, "crc32": 0}', "9" * 6000,
    '{"format": 4, "files": {"../../precious": {"size": 4, "crc32": [1]}}}', '["/precious", "../../precious"]',
    '{"format": 4, "step": -1, "num_processes": 1, "epochs": [], "seeds": []}', '{"format": 4, "step": 1e400}',
    '{"format": 4, "step": 0, "num_processes": 1e3, "epochs": [0], "seeds": [0]}', '{"format": [], "files": []}',
    '{"format": 4, "step": 0, "num_processes": 1, "epochs": [[]], "seeds": {}}', '{"format": true, "step": 0}',
)  # fmt: skip


def _spoil(random_: random.Random, where: Path, outside: Path, good: dict[str, bytes]) -> str:
    """Change one thing in a folder, and say what."""
    name = random_.choice(_NAMES)
    path = where / name
    if not path.parent.resolve().is_relative_to(where.resolve()):  # it is behind a link that was made before
        return f"{name} is behind a link"
    what = random_.choice(["link", "json", "other", "flip", "cut", "gone", "folder", "noise", "folder link", "pipe"])
    if path.parent.is_file() or path.parent.is_symlink():
        return f"{name} has no folder"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir() and not path.is_symlink():
        return f"{name} is a folder"
    path.unlink(missing_ok=True)
    if what == "link":
        path.symlink_to(random_.choice([outside / "precious", "../outside/precious", "/dev/zero", "nowhere", name]))
    elif what == "folder link":
        path.symlink_to(outside)
    elif what == "json":
        path.write_text(random_.choice(_JSON))
    elif what == "other":
        path.write_bytes(good[random_.choice(sorted(good))])
    elif what == "flip" and content:
        at = random_.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << random_.randrange(8))]) + content[at + 1 :])
    elif what == "cut":
        path.write_bytes(content[: random_.randrange(len(content) + 1)])
    elif what == "folder":
        path.mkdir()
    elif what == "noise":
        path.write_bytes(random_.randbytes(random_.randrange(2000)))
    elif what == "pipe":
        os.mkfifo(path)
    return f"{name!r}: {what}"


def _everything(folder: Path) -> dict[str, Any]:
    def look(path: Path) -> Any:
        if path.is_symlink():
            return os.readlink(path)
        return path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): look(path) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("seed", "examples"), [(203, 50), pytest.param(2030, 300, marks=[pytest.mark.slow, pytest.mark.limit(120)])]
)
def test_odd_folders_are_loaded_or_refused_and_nothing_else_happens(tmp_path: Path, seed: int, examples: int):
    random_ = random.Random(seed)
    accelerator, model = _filled(1.0)
    accelerator.save_state(tmp_path / "good")
    good = {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    outcomes = {"loaded": 0, "refused": 0}
    for example in range(examples):
        where = tmp_path / f"example {example}"
        where.mkdir()
        for name, content in good.items():
            (where / name).write_bytes(content)
        changes = [_spoil(random_, where, outside, good) for _ in range(random_.randint(1, 3))]
        told = f"seed {seed}, example {example}: {', '.join(changes)}"
        before = _everything(where), _everything(outside)
        manifest = before[0].get("checkpoint.json")
        model.weight.data.fill_(5)
        drawn = torch.get_rng_state()
        try:
            accelerator.load_state(where)
        except CheckpointError as error:
            text = str(error)
        except BaseException as error:
            raise AssertionError(told) from error
        else:
            text = ""
        if text:
            assert str(where) in text, told
            assert torch.equal(model.weight, torch.full((2, 2), 5.0)), told
            assert torch.equal(torch.get_rng_state(), drawn), told
            outcomes["refused"] += 1
        else:
            # Nobody can know what is right without the manifest.
            assert torch.equal(model.weight, torch.ones(2, 2)) or manifest != good["checkpoint.json"], told
            outcomes["loaded"] += 1
        assert (_everything(where), _everything(outside)) == before, told  # loading changes no folder
        try:
            accelerator.save_state(where)
        except CheckpointError:
            assert "folder" in told, told  # one that has the name of a file
        else:
            accelerator.load_state(where)
        assert _everything(outside) == before[1], told
    assert min(outcomes.values()) > examples / 8, outcomes


# --- Numbered checkpoints ---------------------------------------------------------------------------------------


def _numbering(where: Path, **options: Any) -> tuple[Accelerator, nn.Module]:
    project = ProjectConfiguration(project_dir=where, automatic_checkpoint_naming=True, **options)
    return _filled(1.0, project_config=project)


def test_the_newest_whole_checkpoint_is_loaded_and_the_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    accelerator, model = _numbering(tmp_path)
    for value in range(5):
        model.weight.data.fill_(value)
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_4" / "model.safetensors").unlink()
    optimizer = folder / "checkpoint_3" / "optimizer.bin"
    content = optimizer.read_bytes()
    optimizer.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    (folder / "checkpoint_2" / "checkpoint.json").unlink()
    (folder / "checkpoint_9").mkdir()
    (folder / "checkpoint_10").symlink_to(folder / "checkpoint_0")
    with caplog.at_level(logging.WARNING, "nb_accelerate"):
        accelerator.load_state()
    assert torch.equal(model.weight, torch.full((2, 2), 1.0))
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "checkpoint_1 is loaded" in told
    for line in ("checkpoint_4/model.safetensors is missing", "checkpoint_3/optimizer.bin is not as it was saved",
                 "checkpoint_2/checkpoint.json is missing"):  # fmt: skip
        assert line in told
    assert accelerator.save_state().name == "checkpoint_5"  # not the number of one that was passed over
    shutil.rmtree(folder / "checkpoint_5")
    for path in (folder / "checkpoint_1", folder / "checkpoint_0"):
        (path / "model.safetensors").write_text("")
    model.weight.data.fill_(7)
    with pytest.raises(CheckpointError, match=r"is whole:(\n.*){5}"):
        accelerator.load_state()
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))


def test_a_run_goes_on_beside_links_and_files_that_have_the_next_number(tmp_path: Path):
    accelerator, model = _numbering(tmp_path)
    folder = tmp_path / "checkpoints"
    for _ in range(2):
        accelerator.save_state()
    (folder / "checkpoint_1").rename(tmp_path / "other disk")
    (folder / "checkpoint_1").symlink_to(tmp_path / "other disk")
    (folder / "checkpoint_2").write_text("notes")
    model.weight.data.fill_(5)
    accelerator.load_state()
    assert torch.equal(model.weight, torch.full((2, 2), 1.0))
    assert accelerator.save_state().name == "checkpoint_3"
    accelerator.load_state()
    assert accelerator.project_configuration.iteration == 4
    assert (folder / "checkpoint_2").read_text() == "notes"


def test_a_limit_never_removes_what_was_saved_last_nor_the_only_whole_one(tmp_path: Path):
    accelerator, _ = _numbering(tmp_path, total_limit=2)
    folder = tmp_path / "checkpoints"
    for _ in range(3):
        accelerator.save_state()
    assert sorted(os.listdir(folder)) == ["checkpoint_1", "checkpoint_2"]
    (folder / "checkpoint_2" / "optimizer.bin").unlink()
    accelerator.save_state()
    assert sorted(os.listdir(folder)) == ["checkpoint_1", "checkpoint_3"]
    accelerator.project_configuration.iteration = 0  # numbered lower than those that are there
    shutil.copytree(folder / "checkpoint_3", folder / "checkpoint_7")
    (folder / "checkpoint_7" / "optimizer.bin").unlink()
    accelerator.save_state()
    assert sorted(os.listdir(folder)) == ["checkpoint_0", "checkpoint_3", "checkpoint_7"]
    shutil.rmtree(folder / "checkpoint_7")
    accelerator.project_configuration.iteration = 5

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    handle = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(OSError, match="No space"):
        accelerator.save_state()
    handle.remove()
    assert sorted(os.listdir(folder)) == ["checkpoint_0", "checkpoint_3"]
    accelerator.load_state()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, in_background: bool
):
    accelerator, _ = _numbering(tmp_path, total_limit=1)
    accelerator.save_state()
    rename = Path.rename

    def is_busy(self: Path, target: Path) -> Path:
        if self.name == "checkpoint_0":
            raise OSError(16, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", is_busy)
    for _ in range(2):
        accelerator.save_state(async_save=in_background)
        accelerator.wait_for_checkpoint()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_2"]
    assert "removed: [Errno 16]" in caplog.text


def test_machines_that_share_no_disk_each_have_a_checkpoint_if_asked_for(run_ranks: RunRanks, tmp_path: Path):
    def save_and_load(root: str) -> Any:
        import dataclasses

        from training.checkpoint.test_checkpoint_folders import _numbering

        from nb_accelerate.errors import CheckpointError
        from nb_accelerate.training.checkpoint import shared_staging

        rank = int(os.environ["RANK"])
        own = Path(root) / f"disk {rank}"
        accelerator, model = _numbering(own)
        # As on two machines with a rank each: what is on the disk of one does not exist on the other.
        place = dataclasses.replace(
            accelerator._this_rank(), node_rank=rank, num_nodes=2, local_rank=0, local_world_size=1
        )
        accelerator._this_rank = lambda: place  # type: ignore[method-assign]
        whole = shared_staging.folder_of
        shared_staging.folder_of = lambda path, rank: whole(
            path if path.is_relative_to(own) else Path("/nowhere"), rank
        )
        try:
            accelerator.save_state()
        except CheckpointError as error:
            refused = str(error), sorted(str(path) for path in own.rglob("*") if path.name.startswith("."))
        accelerator.project_configuration.save_on_each_node = True
        folder = accelerator.save_state()
        with torch.no_grad():
            model.module.weight.fill_(5)
        accelerator.load_state()
        manifest = json.loads((folder / "checkpoint.json").read_text())
        files = sorted(path.name for path in folder.iterdir())
        return refused, model.module.weight.sum().item(), manifest["ranks"], files

    files = ["checkpoint.json", "model.safetensors", "optimizer.bin"]
    for rank, (refused, *loaded) in enumerate(run_ranks(save_and_load, str(tmp_path))):
        assert "1 does not see" in refused[0]
        assert refused[1] == []
        assert loaded == [4.0, [rank], [*files, f"random_states_{rank}.pkl"]]


def test_ranks_that_name_different_folders_load_what_was_saved_to_that_of_rank_0(
    run_ranks: RunRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def save_and_load() -> list[float]:
        accelerator, model = _filled(1.0)
        own = tmp_path / f"of rank {accelerator.process_index}"
        own.mkdir()
        found = []
        for folder in (own, own / "inside"):
            accelerator.save_state(folder)
            torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
            accelerator.load_state(folder)
            found.append(accelerator.unwrap_model(model).weight.sum().item())
        return found

    assert run_ranks(save_and_load) == [[4.0, 4.0]] * 2
    assert capfd.readouterr().err.count(f"and rank 0 to {tmp_path / 'of rank 0'}: all of it") == 1
