"""Checkpoints that are loaded into models that may be larger than a device."""

from __future__ import annotations

import importlib
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typing_extensions import override

from nb_accelerate import (
    Accelerator,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from nb_accelerate.errors import CheckpointError, ConfigError, PlacedModelError
from nb_accelerate.training.bigmodel.mapped import files_of
from nb_accelerate.training.checkpoint import placing


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.randn(()))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.norm(self.linear(x)).relu()


class Model(nn.Module):
    """Tied weights, buffers that are saved and one that is not, a parameter beside its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.shift = nn.Parameter(torch.randn(8), requires_grad=False)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift + self.table
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


TOKENS = torch.arange(6)


def trained(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    model = Model()
    with torch.no_grad():
        for _ in range(3):
            model(TOKENS)  # which changes the statistics of the norms
    return model.eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def saved(model: nn.Module, folder: Path, *, size: int | str = "10GB", safe: bool = True) -> Path:
    Accelerator(cpu=True).save_model(model, folder, max_shard_size=size, safe_serialization=safe)
    return folder


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


MAPS: list[dict[str, Any]] = [
    {"": "disk"},
    {"": "cpu"},
    {"": torch.device("cpu")},
    {"embed": "disk", "shift": "disk", "blocks.0": "cpu", "blocks": "disk", "head": "disk"},
]


@pytest.mark.parametrize("size", ["10GB", 500])
@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("make", [empty, Model])
def test_weights_on_the_host_are_views_of_their_files(tmp_path: Path, device_map: Any, size: Any, make: Any) -> None:
    plain = trained()
    before = listing(saved(plain, tmp_path, size=size))
    model = make().eval()
    load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
    assert all(files_of(tensor) for tensor in model.state_dict().values())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert [parameter.requires_grad for parameter in model.parameters()] == [
        parameter.requires_grad for parameter in plain.parameters()
    ]
    assert type(model.shift) is nn.Parameter
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(TOKENS), plain(TOKENS))
    assert listing(tmp_path) == before


@pytest.mark.may_leave("threads")  # of tqdm
def test_what_accelerate_computes_is_computed_here(tmp_path: Path) -> None:
    theirs = pytest.importorskip("accelerate")
    saved(trained(), tmp_path / "model")
    beside = {"embed": "cpu", "shift": "cpu", "head": "cpu"}
    for number, device_map in enumerate(({"": "cpu"}, {**beside, "blocks": "disk"})):
        model = theirs.load_checkpoint_and_dispatch(
            empty(), tmp_path / "model", device_map, offload_folder=tmp_path / str(number), offload_buffers=True
        )
        here = load_checkpoint_and_dispatch(empty(), tmp_path / "model", device_map)
        assert torch.equal(here(TOKENS), model(TOKENS))


def test_mapped_weights_are_trained_as_others_and_the_file_stays(tmp_path: Path) -> None:
    plain, model = trained(), Model()
    file = saved(plain, tmp_path) / "model.safetensors"
    before = file.read_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # holds parameters that the model is to keep
    load_checkpoint_in_model(model, tmp_path, {"": "disk"})
    model.eval()
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for _ in range(2):
        for one, step in ((model, optimizer), (plain, theirs)):
            one(TOKENS).square().sum().backward()
            step.step()
            step.zero_grad()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert file.read_bytes() == before


def test_a_model_on_meta_is_loaded_without_a_map(tmp_path: Path) -> None:
    plain, model = trained(), empty()
    load_checkpoint_in_model(model, saved(plain, tmp_path))
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_weights_in_one_memory_stay_there(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain[1].weight = nn.Parameter(plain[0].weight.data)  # another parameter
    saved(plain, tmp_path)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    for place in ("cpu", "disk"):
        load_checkpoint_in_model(model, tmp_path, {"": place}, strict=True)
        assert torch.equal(model[1].weight, plain[0].weight)
        assert torch.equal(model[0].weight, plain[0].weight)
        with torch.no_grad():
            model[0].weight.zero_()


def test_another_dtype_is_made_in_memory_on_the_cpu_and_written_once_on_the_disk(tmp_path: Path) -> None:
    half = trained().to(torch.bfloat16)
    saved(trained(), tmp_path / "model")
    before = listing(tmp_path)
    in_memory = empty()
    load_checkpoint_in_model(in_memory, tmp_path / "model", {"": "cpu"}, dtype="bfloat16")
    assert listing(tmp_path) == before
    with pytest.raises(ConfigError, match="Give offload_folder"):
        load_checkpoint_in_model(empty(), tmp_path / "model", {"": "disk"}, dtype=torch.bfloat16)
    on_disk = empty()
    load_checkpoint_in_model(on_disk, tmp_path / "model", {"": "disk"}, tmp_path / "new" / "off", dtype=torch.bfloat16)
    (written,) = (tmp_path / "new" / "off").iterdir()
    files = {id(files_of(parameter)) for parameter in on_disk.parameters()}
    assert files == {id(files_of(on_disk.shift))}
    assert files_of(on_disk.shift).entry("shift").file == written  # type: ignore[union-attr]
    for model in (in_memory, on_disk):
        model.table = model.table.to(torch.bfloat16)
        assert torch.equal(model(TOKENS), half(TOKENS))
    # Once more, while the first is in use.
    load_checkpoint_in_model(empty(), tmp_path / "model", {"": "disk"}, tmp_path / "new" / "off", dtype=torch.float16)
    files_of(on_disk.shift).fetch(["shift"])  # type: ignore[union-attr]
    assert torch.equal(on_disk(TOKENS), half(TOKENS))
    assert [path.name for path in (tmp_path / "new" / "off").iterdir()] == [written.name]


def test_by_default_weights_get_the_dtype_of_the_model(tmp_path: Path) -> None:
    saved(trained().half(), tmp_path)
    as_saved, wider = empty().half(), empty()
    load_checkpoint_in_model(as_saved, tmp_path, {"": "disk"})
    assert as_saved.shift.dtype is torch.float16
    load_checkpoint_in_model(wider, tmp_path, {"": "cpu"})
    assert torch.equal(wider(TOKENS), trained().half().float()(TOKENS))
    kept = empty()
    load_checkpoint_in_model(
        kept, tmp_path, {"": "disk"}, tmp_path / "off", dtype="float16", keep_in_fp32_modules=["norm"]
    )
    assert {name.split(".")[-2] for name, one in kept.named_parameters() if one.dtype is torch.float32} == {"norm"}
    with pytest.raises(ConfigError, match="'float17'"):
        load_checkpoint_in_model(empty(), tmp_path, {"": "cpu"}, dtype="float17")


@pytest.mark.parametrize("size", ["10GB", 500])
@pytest.mark.parametrize("device_map", MAPS)
def test_files_of_torch_are_read_and_for_the_disk_written_as_safetensors(
    tmp_path: Path, device_map: Any, size: Any
) -> None:
    plain = trained()
    saved(plain, tmp_path / "model", size=size, safe=False)
    model = empty()
    if "disk" in device_map.values():
        with pytest.raises(ConfigError, match="Give offload_folder"):
            load_checkpoint_in_model(model, tmp_path / "model", device_map)
        assert model.shift.is_meta
    load_checkpoint_in_model(model, tmp_path / "model", device_map, tmp_path / "off")
    on_disk = {name for name in plain.state_dict() if placing.device_of(name, device_map) == "disk"}
    assert {name for name, tensor in model.state_dict().items() if files_of(tensor)} == on_disk
    shutil.rmtree(tmp_path)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_files_of_the_old_format_of_torch_are_read(tmp_path: Path) -> None:
    plain, model = trained(), empty()
    torch.save(plain.state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    load_checkpoint_in_model(model, tmp_path / "old.bin", {"": "disk"}, tmp_path)
    assert torch.equal(model(TOKENS), plain(TOKENS))


class WithState(nn.Linear):
    state: Any = None

    @override
    def get_extra_state(self) -> Any:
        return self.state

    @override
    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_a_state_that_is_no_tensor_is_restored(tmp_path: Path) -> None:
    plain, model = nn.Sequential(WithState(2, 2)), nn.Sequential(WithState(2, 2))
    plain[0].state = {"seen": 3}
    torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True)
    assert model[0].state == {"seen": 3}
    assert torch.equal(model[0].weight, plain[0].weight)


def test_weights_in_8_bits_get_their_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight = torch.randint(-127, 127, (4, 4), dtype=torch.int8)
    save_file({"weight": weight, "SCB": torch.rand(4), "bias": torch.ones(4)}, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(torch.empty(4, 4, dtype=torch.int8, device="meta"), requires_grad=False)
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, strict=True, offload_8bit_bnb=True)
    assert torch.equal(model.weight, weight)
    assert len(model.weight.SCB) == 4  # type: ignore[arg-type]
    assert not caplog.records


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(trained(), tmp_path / "model")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    model = empty()
    with pytest.raises(CheckpointError, match=r"weights take.*1e-07 GB free"):
        load_checkpoint_in_model(model, tmp_path / "model", {"": "disk"}, tmp_path / "off", dtype="float16")
    assert not list((tmp_path / "off").iterdir())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_disk_that_fails_while_it_is_written_is_said(tmp_path: Path) -> None:
    saved(trained(), tmp_path / "model")
    (tmp_path / "off" / "weights-0.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"weights-0\.safetensors"):
        load_checkpoint_in_model(empty(), tmp_path / "model", {"": "disk"}, tmp_path / "off", dtype="float16")
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["weights-0.safetensors"]


def test_a_checkpoint_that_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint_in_model(empty(), tmp_path / "none", {"": "disk"})
    folder = saved(trained(), tmp_path / "model", size=500)
    part = min(folder.glob("*.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"{part.name} cannot be read"):
        load_checkpoint_in_model(empty(), folder, {"": "disk"})
    part.unlink()
    with pytest.raises(CheckpointError, match=rf"not there: {part.name}"):
        load_checkpoint_in_model(empty(), folder, {"": "disk"})


def test_weights_that_do_not_fit_are_named_and_nothing_changes(tmp_path: Path) -> None:
    state = trained().state_dict()
    state["blocks.1.linear.weight"] = torch.ones(8, 9)
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    model = empty()
    with pytest.raises(CheckpointError, match=r"blocks\.1\.linear\.weight .*\(8, 9\)"):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"})
    for left_out, message in (("shift", "has no shift, and"), ("blocks.2.norm.bias", r"has no blocks\.2\.norm\.bias")):
        partial = {name: tensor for name, tensor in trained().state_dict().items() if name != left_out}
        save_file({name: tensor.clone() for name, tensor in partial.items()}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_in_model(model, tmp_path, {"": "disk"})
        with pytest.raises(CheckpointError, match=f"It lacks {left_out}"):
            load_checkpoint_in_model(model, tmp_path, {"": "disk"}, strict=True)
        real = Model()
        before = real.state_dict()[left_out].clone()
        load_checkpoint_in_model(real, tmp_path, {"": "disk"})  # which has numbers for it
        assert torch.equal(real.state_dict()[left_out], before)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_a_weight_that_the_checkpoint_lacks_is_named_and_gets_the_dtype(
    device_map: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: tensor.clone() for name, tensor in trained().state_dict().items() if name != "head.weight"}
    del weights["shift"]
    save_file(weights, tmp_path / "model.safetensors")
    model = Model().eval()
    before = model.shift.clone()
    dtype = None if device_map is None else torch.float16
    load_checkpoint_and_dispatch(model, tmp_path, device_map, offload_folder=tmp_path / "off", dtype=dtype)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == ["shift"]
    assert torch.equal(model.shift, before.to(dtype))
    model.table = model.table.to(dtype)
    assert model(TOKENS).dtype is (dtype or torch.float32)


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, imported once, which takes longer than a test may."""
    package = pytest.importorskip("transformers")
    importlib.import_module("transformers.modeling_utils")
    return package


def test_a_checkpoint_with_other_names_is_no_checkpoint_with_missing_files(tmp_path: Path, transformers: Any) -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    saved(transformers.GPTNeoXForCausalLM(config), tmp_path / "converted")
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    weights["embed_out.weight"] = weights.pop("lm_head.weight")  # as transformers saves it
    save_file(weights, tmp_path / "converted" / "model.safetensors")
    save_file({"first.weight": torch.ones(2), "first.bias": torch.ones(2)}, tmp_path / "own.safetensors")
    with init_empty_weights():
        model, own = transformers.GPTNeoXForCausalLM(config), nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError,
        match=r"lm_head\.weight\. .* GPTNeoXForCausalLM\.from_pretrained\('.*converted', device_map='auto'\)",
    ):
        load_checkpoint_and_dispatch(model, tmp_path / "converted", "auto")
    with pytest.raises(CheckpointError, match=r"first\.bias, first\.weight.*model as"):
        load_checkpoint_in_model(own, tmp_path / "own.safetensors", {"": "cpu"})


def test_weights_that_are_to_be_tied_are_said_to_be(tmp_path: Path, transformers: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    saved(transformers.BertForMaskedLM(config), tmp_path)
    with init_empty_weights():
        model = transformers.BertForMaskedLM(config)
    load_checkpoint_in_model(model, tmp_path, {"": "disk"}, strict=True)
    decoder = model.cls.predictions.decoder
    decoder.weight, decoder.bias = (nn.Parameter(one.detach().to("meta")) for one in (decoder.weight, decoder.bias))
    with pytest.raises(CheckpointError, match=r"call model\.tie_weights\(\) before"):
        load_checkpoint_in_model(model, tmp_path, {"": "disk"})


def test_a_map_that_does_not_fit_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(trained(), tmp_path)
    with pytest.raises(ConfigError, match=r"no device for shift"):
        load_checkpoint_in_model(empty(), tmp_path, {"embed": "cpu", "head": "cpu", "blocks": "disk"})
    for device in (99, "cuda:99", "nowhere"):
        with pytest.raises(PlacedModelError, match=rf"sees no device {device!r}"):
            load_checkpoint_in_model(empty(), tmp_path, {"": "cpu", "blocks": device})
    with pytest.raises(ConfigError, match=r"device_map='fast'.*'auto', 'balanced'"):
        load_checkpoint_and_dispatch(empty(), tmp_path, "fast")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(empty(), tmp_path, {"": "cpu", "head": "disk"})
    assert "{'embed.weight': 'cpu', 'head.weight': 'disk'}" in caplog.text


def test_classes_that_a_model_says_stay_whole_do(tmp_path: Path) -> None:
    model = empty()
    kind = type(model.blocks[0]).__name__
    model._no_split_modules = [kind]
    device_map = infer_auto_device_map(model, {"cpu": 1000, "disk": "1GB"}, [kind])
    model = load_checkpoint_and_dispatch(model, saved(trained(), tmp_path), "auto", {"cpu": 1000, "disk": "1GB"})
    assert model.hf_device_map == device_map
    assert "blocks" in device_map
    assert "blocks" not in infer_auto_device_map(empty(), {"cpu": 1000, "disk": "1GB"})


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential", None])
def test_a_model_is_loaded_and_placed_in_one_call(tmp_path: Path, device_map: str | None) -> None:
    plain = trained()
    model = load_checkpoint_and_dispatch(
        empty(), saved(plain, tmp_path), device_map, max_memory={"cpu": 1000, "disk": "1GB"}, strict=True
    )
    assert all(files_of(parameter) for parameter in model.parameters())
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.may_leave("threads")  # of tqdm
def test_a_bar_is_shown_while_much_is_loaded_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(trained(), tmp_path / "model")

    def load(place: str) -> str:
        load_checkpoint_in_model(empty(), tmp_path / "model", {"": place}, tmp_path / "off", dtype="float16")
        return capsys.readouterr().err

    assert not load("cpu")
    monkeypatch.setattr(placing, "_LONG", 1)
    for place in ("cpu", "disk"):
        text = load(place)
        assert "loading weights" in text
        assert "B/s" in text
    load_checkpoint_in_model(empty(), tmp_path / "model", {"": "disk"})
    assert not capsys.readouterr().err


def test_much_is_read_in_the_order_of_the_files_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[str]] = []
    fetch = placing.WeightFiles.fetch

    def noted(files: Any, names: list[str]) -> None:
        fetched.append(names)
        fetch(files, names)

    monkeypatch.setattr(placing.WeightFiles, "fetch", noted)
    monkeypatch.setattr(placing, "_AHEAD", 600)
    plain, model = trained(), empty()
    load_checkpoint_in_model(model, saved(plain, tmp_path, size=500), {"": "cpu"}, dtype="float64")
    assert torch.equal(model.blocks[2].linear.weight, plain.blocks[2].linear.weight.double())
    assert len([group for group in fetched if group]) > 3
    files = placing.WeightFiles(sorted(tmp_path.glob("*.safetensors")))
    places = [(files.entry(name).file, files.entry(name).start) for group in fetched for name in group]
    assert places == sorted(places)
    assert len(places) == len(files) - 3  # what the norms count stays whole numbers
