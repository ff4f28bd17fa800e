"""Models on the disk: in one file or several, odd ones too, and what is wrong with one is said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint.model import load_checkpoint_in_model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3))


class Odd(nn.Module):
    """What else there may be in a model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)  # as DistributedDataParallel has one
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        weight = self.module.weight.data
        self.register_buffer("flat", weight.view(6))
        self.register_buffer("row", weight[0])
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("short", torch.randn(3).bfloat16())
        self.register_buffer("number", torch.tensor(3))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_odd_models_are_saved_and_loaded(run_ranks: RunRanks, tmp_path: Path, safe: bool, ranks: int):
    def save_and_load(where: str, safe: bool) -> list[str]:
        from training.checkpoint.test_saved_models import Odd

        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Odd())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        accelerator.save_state(where, safe_serialization=safe)
        accelerator.wait_for_everyone()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        accelerator.load_state(where)
        return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]

    assert run_ranks(save_and_load, str(tmp_path), safe, world_size=ranks) == [[]] * ranks


class Stateful(nn.Linear):
    def __init__(self, seen: Any) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_what_safetensors_cannot_hold_is_said_and_saved_otherwise(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Stateful(7))
    with pytest.raises(CheckpointError, match=r"_extra_state.*safe_serialization=False"):
        accelerator.save_state(tmp_path)
    accelerator.save_state(tmp_path, safe_serialization=False)
    model.seen = 0
    accelerator.load_state(tmp_path)
    assert model.seen == 7
    model.register_buffer("thin", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"type torch\.sparse_coo"):
        accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path, safe_serialization=False)
    accelerator.load_state(tmp_path)


def test_a_model_without_weights_is_a_file_without_weights(tmp_path: Path):
    Accelerator(cpu=True).save_model(nn.ReLU(), tmp_path)
    load_checkpoint_in_model(nn.ReLU(), tmp_path, strict=True)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 100])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_model_is_saved_in_pieces_and_loaded(tmp_path: Path, safe: bool, size: Any, device_map: Any):
    accelerator = Accelerator(cpu=True)
    model = Tied()
    accelerator.save_model(model, tmp_path, max_shard_size="10GB", safe_serialization=not safe)
    accelerator.save_model(model, tmp_path, max_shard_size=size, safe_serialization=safe)
    names = {path.name for path in tmp_path.iterdir()}
    assert all(name.startswith("model" if safe else "pytorch_model") for name in names)  # the other way's have gone
    assert (len(names) > 1) == (size == 100)
    assert any(name.endswith(".index.json") for name in names) == (size == 100)
    other = Tied()
    load_checkpoint_in_model(other, tmp_path, device_map=device_map, strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.head.weight is other.embed.weight


def test_a_model_on_meta_gets_its_weights_in_the_numbers_that_are_asked_for(tmp_path: Path):
    Accelerator(cpu=True).save_model(Tied(), tmp_path)
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(CheckpointError, match="meta"):
        Accelerator(cpu=True).save_model(empty, tmp_path / "b")
    load_checkpoint_in_model(
        empty, tmp_path, device_map={"": "cpu"}, dtype="float16", keep_in_fp32_modules=["body"], strict=True
    )
    assert {name: tensor.dtype for name, tensor in empty.state_dict().items()} == {
        "embed.weight": torch.float16,
        "head.weight": torch.float16,
        "body.weight": torch.float32,
        "body.bias": torch.float32,
        "seen": torch.int64,
    }
    assert empty.head.weight is empty.embed.weight


def test_weights_that_a_model_does_not_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    torch.save(nn.Linear(2, 2).state_dict() | {"extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(nn.Linear(2, 2), tmp_path)
    assert "Linear was loaded" in caplog.text


def test_what_is_wrong_with_a_model_is_said(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(Tied(), tmp_path / "pieces", max_shard_size=100)
    for part in (tmp_path / "pieces").glob("model-00001*"):
        part.unlink()
    with pytest.raises(CheckpointError, match="model-00001-of-"):
        load_checkpoint_in_model(Tied(), tmp_path / "pieces")
    accelerator.save_model(Tied(), tmp_path / "whole")
    with pytest.raises(CheckpointError, match="lacks bias, weight"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "whole", strict=True)
    with pytest.raises(ConfigError, match=r"no device for (seen|embed)"):
        load_checkpoint_in_model(Tied(), tmp_path / "whole", device_map={"body": "cpu"})
    accelerator.save_model(nn.Linear(2, 4), tmp_path / "wide")
    with pytest.raises(CheckpointError, match=r"\(4,\) in the checkpoint"):
        load_checkpoint_in_model(nn.Linear(2, 3), tmp_path / "wide" / "model.safetensors", device_map={"": "cpu"})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    with pytest.raises(CheckpointError, match="not the index"):
        load_checkpoint_in_model(Tied(), tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no file"):
        load_checkpoint_in_model(Tied(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        accelerator.save_model(Tied(), tmp_path / "file")
    shutil.rmtree(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint_in_model(Tied(), tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.may_leave("threads")  # of tqdm
def test_models_of_transformers_are_saved_and_loaded_both_ways(tmp_path: Path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(BertForMaskedLM(config))  # whose head is tied to its embedding
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained(
        tmp_path / "theirs",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.save_model(model, tmp_path / "ours")
    config.save_pretrained(tmp_path / "ours")
    fresh = BertForMaskedLM(config)
    load_checkpoint_in_model(fresh, tmp_path / "theirs")
    for again in (
        fresh,
        BertForMaskedLM.from_pretrained(tmp_path / "theirs"),
        BertForMaskedLM.from_pretrained(tmp_path / "ours"),
    ):
        assert again.state_dict().keys() == plain.state_dict().keys()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
