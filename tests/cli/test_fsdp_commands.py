"""``merge-weights`` and ``to-fsdp2``."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file, save_file

from nb_accelerate.cli import main
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.sharded import merge_weights

WEIGHTS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layer.bias": torch.ones(3, dtype=torch.bfloat16),
    "steps": torch.tensor(7),
}


def _same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in WEIGHTS.items()
    )


@pytest.fixture
def distributed(tmp_path: Path) -> Path:
    """A folder of torch.distributed.checkpoint with a model, an optimizer and a number."""
    folder = tmp_path / "pytorch_model_fsdp_0"
    optimizer = {"exp_avg": torch.zeros(3, 4)}
    dcp.save({"model": WEIGHTS, "optimizer": optimizer, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder with two safetensors files and their index."""
    folder = tmp_path / "parts"
    folder.mkdir()
    files = {name: f"model-0000{number}-of-00002.safetensors" for number, name in zip((1, 2, 2), WEIGHTS, strict=True)}
    for file in set(files.values()):
        save_file({name: WEIGHTS[name] for name in WEIGHTS if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.contract("commands: merge-weights")
@pytest.mark.parametrize("kind", ["distributed", "indexed"])
def test_weights_are_merged_into_one_file(kind: str, request, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = request.getfixturevalue(kind)
    assert main(["merge-weights", str(folder), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "model.safetensors"
    assert capsys.readouterr().out == f"{file}\n"
    assert _same(load_file(file))
    assert folder.is_dir()


def test_a_checkpoint_may_be_removed_when_it_is_merged_and_the_file_be_of_torch(distributed: Path, tmp_path: Path):
    assert (
        main(["merge-weights", "--unsafe_serialization", "--remove_checkpoint_dir", str(distributed), str(tmp_path)])
        == 0
    )
    assert _same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert not distributed.exists()


def test_what_was_just_written_is_not_removed(distributed: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["merge-weights", "--remove_checkpoint_dir", str(distributed), str(distributed / "out")]) == 2
    assert "Write to another folder" in capsys.readouterr().err
    assert (distributed / ".metadata").is_file()


def test_code_in_a_checkpoint_is_not_run(distributed: Path, tmp_path: Path):
    class Bad:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (distributed / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(CheckpointError, match=r"would load.*checkpoint needs"):
        merge_weights(distributed, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_attributes_of_what_is_no_enum_are_not_read(distributed: Path, tmp_path: Path):
    class Bad:
        def __reduce__(self):
            return getattr, (torch.float32, "itemsize")

    (distributed / ".metadata").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(CheckpointError, match=r"read itemsize of torch.float32"):
        merge_weights(distributed, tmp_path)


def test_files_outside_of_the_folder_are_not_read(distributed: Path, tmp_path: Path):
    metadata = pickle.loads((distributed / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../elsewhere"
    (distributed / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'../elsewhere'"):
        merge_weights(distributed, tmp_path)


def test_a_cut_off_checkpoint_is_refused(distributed: Path, tmp_path: Path):
    for file in distributed.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="is damaged"):
        merge_weights(distributed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_above_the_checkpoint_is_told_so(distributed: Path):
    with pytest.raises(CheckpointError, match=r"Give the.*pytorch_model_fsdp_0"):
        merge_weights(distributed.parent, distributed.parent / "out")


OLD = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_use_orig_params": True,
    },
}
NEW = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": False,
    "fsdp_version": 2,
}


def _config(folder: Path, **section: object) -> Path:
    file = folder / "old.yaml"
    file.write_text(yaml.safe_dump({**OLD, "fsdp_config": {**OLD["fsdp_config"], **section}}))
    return file


@pytest.mark.contract("commands: to-fsdp2")
def test_a_configuration_is_converted_and_says_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, target = _config(tmp_path), tmp_path / "new.yaml"
    assert main(["to-fsdp2", "--config_file", str(file), "--output_file", str(target)]) == 0
    assert yaml.safe_load(target.read_text()) == {**OLD, "fsdp_config": NEW}
    shown = capsys.readouterr()
    assert shown.out == f"{target}\n"
    assert "fsdp_backward_prefetch is left out: " in shown.err
    assert "fsdp_use_orig_params is left out: " in shown.err


@pytest.mark.parametrize(("strategy", "reshards"), [(1, True), ("2", False), ("HYBRID_SHARD", True), (True, True)])
def test_numbers_and_words_of_the_sharding_strategy_mean_the_same(tmp_path: Path, strategy: object, reshards: bool):
    file = _config(tmp_path, fsdp_sharding_strategy=strategy)
    assert main(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 0
    assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_reshard_after_forward"] is reshards


def test_a_file_that_names_no_version_is_of_version_1(tmp_path: Path):
    file = _config(tmp_path, fsdp_version=None)
    assert main(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 0
    assert yaml.safe_load(file.read_text())["fsdp_config"]["fsdp_version"] == 2


def test_what_accelerate_converts_is_converted_alike(tmp_path: Path):
    theirs = pytest.importorskip("accelerate.commands.to_fsdp2")
    file = _config(tmp_path, fsdp_min_num_params=100, fsdp_state_dict_type="SHARDED_STATE_DICT")
    converted = theirs.convert_config_to_fsdp2(yaml.safe_load(file.read_text()))
    assert main(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 0
    assert yaml.safe_load(file.read_text()) == converted


def test_no_file_is_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = _config(tmp_path)
    before = file.read_text()
    assert main(["to-fsdp2", "--config_file", str(file)]) == 2
    assert main(["to-fsdp2", "--config_file", str(file), "--output_file", str(file)]) == 2
    assert capsys.readouterr().err.count("or add --overwrite") == 2
    assert file.read_text() == before


def test_a_file_of_version_2_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = _config(tmp_path, fsdp_version=2)
    before = file.read_text()
    assert main(["to-fsdp2", "--config_file", str(file), "--overwrite"]) == 0
    assert "version 2" in capsys.readouterr().out
    assert file.read_text() == before
