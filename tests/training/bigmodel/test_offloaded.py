"""Weights in folders of accelerate's format, written and read beside accelerate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import accelerate.utils as theirs
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import nb_accelerate.utils as ours
from nb_accelerate.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def weights_of_all_kinds() -> dict[str, Tensor]:
    numbers = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)) * 3
    kinds = {f"layer.{str(dtype)[6:]}": numbers.to(dtype) for dtype in DTYPES}
    return {
        **kinds,
        "number": torch.tensor(2.5),
        "small_number": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and bits are the same."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_files_are_accelerates_byte_for_byte(tmp_path: Path) -> None:
    weights = weights_of_all_kinds()
    for name, library in (("ours", ours), ("theirs", theirs)):
        library.offload_state_dict(tmp_path / name, weights)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")
    assert len(files_in(tmp_path / "ours")) == len(weights) + 1


@pytest.mark.parametrize(("writer", "reader"), [(ours, theirs), (theirs, ours), (ours, ours)])
def test_what_one_wrote_the_other_reads(writer: Any, reader: Any, tmp_path: Path) -> None:
    weights = weights_of_all_kinds()
    if reader is theirs:
        del weights["empty"]  # NumPy maps no empty file
    writer.offload_state_dict(tmp_path, weights)
    loader = reader.OffloadedWeightsLoader(save_folder=tmp_path)
    assert list(loader) == list(weights)
    assert len(loader) == len(weights)
    assert all(same(loader[name], weight) for name, weight in weights.items())


def test_weights_of_a_folder_are_added_to_and_replaced(tmp_path: Path) -> None:
    for name, library in (("ours", ours), ("theirs", theirs)):
        folder = tmp_path / name
        library.offload_state_dict(folder, {"a": torch.zeros(2), "b": torch.zeros(3)})
        index: dict[str, Any] = {}
        assert library.offload_weight(torch.ones(4), "b", folder, index=index) is index
        library.offload_weight(torch.ones(4), "not_in_the_index", folder)
        library.save_offload_index(index, folder)
        library.save_offload_index({}, folder)
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "theirs")


def test_a_weight_that_was_loaded_keeps_its_numbers_when_its_file_is_replaced_or_removed(tmp_path: Path) -> None:
    ours.offload_state_dict(tmp_path, {"a": torch.ones(10_000)})
    loaded = ours.OffloadedWeightsLoader(save_folder=tmp_path)["a"]
    ours.offload_state_dict(tmp_path, {"a": torch.zeros(3)})
    shutil.rmtree(tmp_path)
    assert torch.equal(loaded, torch.ones(10_000))


def test_a_changed_weight_leaves_its_file_as_it_was(tmp_path: Path) -> None:
    ours.offload_state_dict(tmp_path, {"a": torch.ones(4)})
    before = files_in(tmp_path)
    ours.OffloadedWeightsLoader(save_folder=tmp_path)["a"].zero_()
    assert files_in(tmp_path) == before


def test_trained_weights_are_written_too(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    ours.offload_state_dict(tmp_path, dict(model.named_parameters()))
    assert same(ours.OffloadedWeightsLoader(save_folder=tmp_path)["weight"], model.weight.detach())


def test_a_loader_looks_in_memory_first_then_in_safetensors_and_dat_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "inner.b": torch.arange(4.0)}, file)
    ours.offload_state_dict(tmp_path, {"c": torch.zeros(2)})
    index = {
        "a": {"safetensors_file": str(file)},
        "b": {"safetensors_file": str(file), "weight_name": "inner.b", "dtype": "float16"},
        "c": {"dtype": "float32", "shape": [2]},
    }
    memory = {"a": torch.full((3,), 7.0), "d": torch.zeros(1)}
    for library in (ours, theirs):
        loader = library.OffloadedWeightsLoader(memory, tmp_path, index)
        assert list(loader) == ["a", "d", "b", "c"]
        assert loader["a"] is memory["a"]
        assert same(loader["b"], torch.arange(4.0).half())
        assert same(loader["c"], torch.zeros(2))
        assert same(library.OffloadedWeightsLoader(index=index, device="cpu")["a"], torch.ones(3))
        with pytest.raises(KeyError):
            loader["e"]


def test_a_safetensors_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nb_accelerate.training.bigmodel import offloaded

    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, file)
    opened: list[Any] = []
    original = offloaded.WeightFiles
    monkeypatch.setattr(offloaded, "WeightFiles", lambda files: opened.append(files) or original(files))
    rows = {name: {"safetensors_file": str(file)} for name in ("a", "b")}
    loader = ours.OffloadedWeightsLoader(index=rows)
    assert opened == []
    assert loader["a"].data_ptr() == loader["a"].data_ptr()
    loader["b"]
    assert opened == [[file]]


def test_a_prefix_is_left_out_of_names_and_put_before_them() -> None:
    whole = {"a.weight": torch.zeros(1), "a.bias": torch.ones(1), "b.weight": torch.ones(2)}
    part = ours.PrefixedDataset(whole, "a.")
    assert part["bias"] is whole["a.bias"] is theirs.PrefixedDataset(whole, "a.")["bias"]
    assert dict(part) == {"weight": whole["a.weight"], "bias": whole["a.bias"]}
    assert len(part) == 2
    assert part.dataset is whole
    assert "a.bias" not in part


def test_offloaded_weights_come_back_into_a_model(tmp_path: Path) -> None:
    weights = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    ours.offload_state_dict(tmp_path, weights)
    index = json.loads((tmp_path / "index.json").read_text())
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    for library, model in zip((ours, theirs), models, strict=True):
        model[0].to("meta")
        library.load_offloaded_weights(model, index, tmp_path)
        library.load_offloaded_weights(model, None, tmp_path)
        assert all(same(model.state_dict()[name], weight) for name, weight in weights.items())
    assert isinstance(models[0][0].weight, nn.Parameter)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.offload_state_dict(tmp_path, {"a": torch.zeros(25)})
    before = files_in(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100))
    ours.offload_state_dict(tmp_path, {"a": torch.zeros(25), "b": torch.zeros(25)})  # "a" leaves the space of its file
    after = files_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"has .*GB free"):
        ours.offload_state_dict(tmp_path, {"c": torch.zeros(13), "d": torch.zeros(13)})
    with pytest.raises(CheckpointError, match="Nothing was written"):
        ours.offload_weight(torch.zeros(26), "e", tmp_path)
    assert files_in(tmp_path) == after
    assert before.keys() < after.keys()


def test_a_disk_that_fails_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.dat").mkdir()
    with pytest.raises(CheckpointError, match=r"a\.dat could"):
        ours.offload_weight(torch.zeros(1), "a", tmp_path)


def written(folder: Path) -> Path:
    ours.offload_state_dict(folder, {"a": torch.ones(3, 4), "b": torch.ones(2)})
    return folder


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json, the index"):
        ours.OffloadedWeightsLoader(save_folder=tmp_path)


@pytest.mark.parametrize("text", ["", '{"a": {"dtype"', "[1]", '{"a": 1}', "[" * 100_000, "\xff"])
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    (written(tmp_path) / "index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"index\.json is (damaged|not an index)"):
        ours.OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"index\.json is (damaged|not an index)"):
        ours.save_offload_index({"c": {"dtype": "int8", "shape": []}}, tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "float31", "shape": [3, 4]},
        {"dtype": "nn", "shape": [3, 4]},
        {"dtype": 4, "shape": [3, 4]},
        {"dtype": "float32", "shape": "wide"},
        {"dtype": "float32", "shape": [3.5]},
        {"dtype": "float32", "shape": None},
    ],
)
def test_a_row_that_describes_no_tensor_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    loader = ours.OffloadedWeightsLoader(save_folder=written(tmp_path), index={"a": row})
    with pytest.raises(CheckpointError, match=r"no dtype.*a\.dat"):
        loader["a"]


@pytest.mark.parametrize("shape", [[3, 5], [3, 3], [-3, -4], [0, 4]])
def test_a_file_of_another_size_is_refused(shape: list[int], tmp_path: Path) -> None:
    loader = ours.OffloadedWeightsLoader(
        save_folder=written(tmp_path), index={"a": {"dtype": "float16", "shape": [6, 4]} | {"shape": shape}}
    )
    with pytest.raises(CheckpointError, match=r"a\.dat has 48 bytes"):
        loader["a"]


def test_files_that_are_missing_or_cut_off_are_named(tmp_path: Path) -> None:
    loader = ours.OffloadedWeightsLoader(save_folder=written(tmp_path))
    (tmp_path / "a.dat").unlink()
    (tmp_path / "b.dat").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"a\.dat cannot be read"):
        loader["a"]
    with pytest.raises(CheckpointError, match=r"b\.dat has 3\b.* 8\b"):
        loader["b"]


def test_a_safetensors_file_without_the_weight_or_cut_off_while_open_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, file)
    loader = ours.OffloadedWeightsLoader(index={name: {"safetensors_file": str(file)} for name in ("a", "b")})
    with pytest.raises(CheckpointError, match="has no weight b"):
        loader["b"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut off"):
        loader["a"]


def errors_of(call: Any) -> Iterable[type[BaseException]]:
    for library in (ours, theirs):
        with pytest.raises(ValueError, match="index") as caught:
            call(library)
        yield caught.type


def test_a_loader_without_any_place_is_refused_as_by_accelerate() -> None:
    assert list(errors_of(lambda library: library.OffloadedWeightsLoader())) == [ConfigError, ValueError]


def test_a_dat_file_without_its_folder_is_refused() -> None:
    loader = ours.OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})
    with pytest.raises(ConfigError, match="save_folder"):
        loader["a"]
