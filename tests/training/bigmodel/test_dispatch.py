"""Models that are placed on the CPU and the disk, beside plain ones and beside accelerate."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from fixtures.placed_models import LoRA, Placed, tokens
from safetensors.torch import load_file, save_file
from torch import nn

import nb_accelerate
from nb_accelerate import big_modeling, init_empty_weights
from nb_accelerate.errors import CheckpointError, ConfigError, PlacedModelError
from nb_accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from nb_accelerate.training.bigmodel.mapped import files_of

MAPS: list[dict[str, Any]] = [
    {"": "cpu"},
    {"": torch.device("cpu")},
    {"": "disk"},
    {"": "disk", "layers.1": "cpu", "layers.2.up": "cpu"},
    {"embedding": "cpu", "head": "cpu", "layers": "disk", "norm": "disk", "scale": "disk", "table": "cpu"},
    {"embedding": "disk", "head": "cpu", "layers.0.up": "disk", "layers.0.down.weight": "disk",
     "layers.0.down.bias": "cpu", "layers.1": "disk", "layers.2": "cpu", "layers.3": "disk", "norm": "cpu",
     "scale": "cpu", "table": "cpu"},
]  # fmt: skip

OFFLOAD = {"layers": "disk", "embedding": "cpu", "head": "cpu", "norm": "cpu", "scale": "cpu", "table": "cpu"}


def _is_plain(model: nn.Module) -> bool:
    added = {"_hf_hook", "_old_forward", "forward", "to", "cuda", "cpu"}
    return not any(added & vars(module).keys() for module in model.modules())


def _same_weights(model: nn.Module, other: nn.Module) -> bool:
    ours, theirs = model.state_dict(), other.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.contract("training: models larger than memory")
@pytest.mark.parametrize("device_map", MAPS)
def test_outputs_are_those_of_the_plain_model_bit_for_bit_and_of_accelerates(
    device_map: dict[str, Any], tmp_path: Path
) -> None:
    model = nb_accelerate.dispatch_model(Placed(), device_map, offload_dir=tmp_path / "ours")
    plain = Placed()
    want = plain(tokens())
    if device_map.get("") != "disk":  # which accelerate has no weights for
        theirs = accelerate.dispatch_model(Placed(), device_map, offload_dir=tmp_path / "theirs")
        assert torch.equal(theirs(tokens()), want)
    assert all(torch.equal(model(tokens()), want) for _ in range(3))
    with torch.inference_mode():
        assert torch.equal(model(tokens()), want)
    assert model.hf_device_map == device_map
    assert _same_weights(model, plain)
    assert model.head.weight is model.embedding.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert _is_plain(model)
    assert torch.equal(model.to("cpu")(tokens()), want)


def test_where_nothing_moves_there_is_no_hook() -> None:
    model = nb_accelerate.dispatch_model(Placed(), {"": "cpu"})
    assert _is_plain(model)
    assert _is_plain(nb_accelerate.cpu_offload(model))


def test_a_block_of_the_disk_has_one_hook_and_views_of_files(tmp_path: Path) -> None:
    model = nb_accelerate.dispatch_model(Placed(layers=2), OFFLOAD, offload_dir=tmp_path)
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert set(hooked) >= {"layers.0", "layers.1"}
    assert not any(name.startswith("layers.0.") for name in hooked)
    assert files_of(model.layers[0].up.weight) is not None
    assert files_of(model.embedding.weight) is None
    hook = model.layers[0]._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert torch.equal(hook.weights_map["up.weight"], model.layers[0].up.weight)


def test_weights_are_written_once_and_accelerate_reads_the_folder(tmp_path: Path) -> None:
    nb_accelerate.disk_offload(Placed(), tmp_path)
    written = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(written) == 2
    with init_empty_weights():
        ours, theirs = Placed(), Placed()
    for name in ("scale", "embedding.weight"):
        assert name in json.loads((tmp_path / "index.json").read_text())
    for model in (ours, theirs):
        model.table = Placed().table
    nb_accelerate.disk_offload(ours, tmp_path, execution_device="cpu")
    accelerate.disk_offload(theirs, tmp_path, execution_device=torch.device("cpu"))
    want = Placed()(tokens())
    assert torch.equal(ours(tokens()), want)
    assert torch.equal(theirs(tokens()), want)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == written


def test_a_folder_that_accelerate_wrote_is_used(tmp_path: Path) -> None:
    accelerate.disk_offload(Placed(), tmp_path)
    with init_empty_weights():
        empty = Placed()
    model = nb_accelerate.disk_offload(empty, tmp_path, execution_device="cpu")
    model.table = Placed().table
    assert torch.equal(model(tokens()), Placed()(tokens()))
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("before", ["dispatch_model", "disk_offload", "offload_state_dict", "accelerate"])
@pytest.mark.parametrize("after", ["dispatch_model", "disk_offload", "safetensors", "bin", "float64", "without scale"])
def test_a_model_has_its_own_weights_in_a_folder_of_another(tmp_path: Path, before: str, after: str) -> None:
    folder, first, second = tmp_path / "folder", Placed(), Placed(seed=1)
    with torch.no_grad():
        second.scale += 1
    if before == "accelerate":
        accelerate.disk_offload(Placed(), folder)
    elif before == "offload_state_dict":
        nb_accelerate.utils.offload_state_dict(folder, first.state_dict())
    else:
        _offloaded(before, first, folder)
    want = second(tokens())
    if after in ("dispatch_model", "disk_offload"):
        model = _offloaded(after, copy.deepcopy(second), folder)
    else:
        weights = {name: tensor for name, tensor in second.state_dict().items() if name not in ("head.weight", after)}
        if after == "without scale":
            weights.pop("scale")
        file = tmp_path / ("model.bin" if after == "bin" else "model.safetensors")
        (torch.save if after == "bin" else save_file)(weights, file)
        model = Placed()
        model.table = second.table
        with torch.no_grad():
            model.scale.copy_(second.scale)  # of a new head: the checkpoint may not have it
        dtype = torch.float64 if after == "float64" else None
        nb_accelerate.load_checkpoint_and_dispatch(model, file, {"": "disk"}, offload_folder=folder, dtype=dtype)
    assert torch.equal(model(tokens()).float(), want) or after == "float64"
    assert all(torch.equal(tensor.float(), second.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(first(tokens()), Placed()(tokens()))  # whose files may have been replaced
    assert len(list(folder.glob("weights-?*.safetensors"))) <= 2


def _offloaded(way: str, model: nn.Module, folder: Path) -> nn.Module:
    if way == "disk_offload":
        return nb_accelerate.disk_offload(model, folder)
    return nb_accelerate.dispatch_model(model, {"": "disk"}, offload_dir=folder)


@pytest.mark.parametrize("folder", [True, False])
def test_an_index_of_files_is_mapped_and_weights_of_another_dtype_are_converted(tmp_path: Path, folder: bool) -> None:
    """As transformers gives it: weights of the disk are on meta, and may be in the files in another dtype."""
    plain = Placed().to(torch.float64)
    save_file({f"x.{name}": tensor.clone() for name, tensor in plain.state_dict().items()}, tmp_path / "a.safetensors")
    plain = plain.float()
    model = Placed()
    index = {
        name: {"safetensors_file": str(tmp_path / "a.safetensors"), "weight_name": f"x.{name}", "dtype": "float32"}
        for name, _ in model.layers.named_parameters(prefix="layers")
    }
    model.layers.to("meta")
    options: dict[str, Any] = {"offload_dir": tmp_path / "folder"} if folder else {}
    nb_accelerate.dispatch_model(model, OFFLOAD, offload_index=index, **options)
    assert torch.equal(model(tokens()), Placed()(tokens()))
    assert _same_weights(model, plain)
    assert (files_of(model.layers[0].up.weight) is not None) is folder


def test_a_state_dict_gives_weights_of_the_cpu(tmp_path: Path) -> None:
    weights = {f"layers.{name}": tensor for name, tensor in Placed(seed=3).layers.state_dict().items()}
    outputs = [
        library.cpu_offload(Placed(), state_dict={**Placed().state_dict(), **weights})(tokens())
        for library in (nb_accelerate, accelerate)
    ]
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], Placed()(tokens()))


def test_a_model_of_the_disk_trains_on_the_cpu_and_its_files_stay(tmp_path: Path) -> None:
    model, plain = nb_accelerate.disk_offload(Placed(), tmp_path), Placed()
    before = {file: load_file(file) for file in tmp_path.glob("*.safetensors")}
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(tokens()).square().mean().backward()
            optimizer.step()
    assert _same_weights(model, plain)
    for file, weights in before.items():
        assert all(torch.equal(tensor, weights[name]) for name, tensor in load_file(file).items())


def test_copies_and_pickles_have_weights_of_their_own(tmp_path: Path) -> None:
    model, want = nb_accelerate.disk_offload(Placed(), tmp_path), Placed()(tokens())
    model(tokens())
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(made(tokens()), want)
        assert made.layers[0]._hf_hook.schedule is not model.layers[0]._hf_hook.schedule
        assert made.layers[0]._hf_hook.schedule is made.layers[1]._hf_hook.schedule
        with torch.no_grad():
            made.layers[0].up.weight.zero_()
        assert not torch.equal(made(tokens()), want)
    assert torch.equal(model(tokens()), want)


def test_threads_compute_in_one_model(tmp_path: Path) -> None:
    model, want = nb_accelerate.disk_offload(Placed(), tmp_path), Placed()(tokens())
    outputs: list[list[bool]] = []

    def compute() -> None:
        with torch.no_grad():
            outputs.append([torch.equal(model(tokens()), want) for _ in range(10)])

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [[True] * 10] * 4


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [0, 0, 1], [2]])
def test_blocks_may_be_called_out_of_order_twice_or_never(tmp_path: Path, order: list[int]) -> None:
    model, plain = nb_accelerate.disk_offload(Placed(), tmp_path), Placed()
    for each in ([0, 1, 2, 3], order, order, [0, 1, 2, 3]):
        model.order = plain.order = each
        assert torch.equal(model(tokens()), plain(tokens()))


def test_an_exception_inside_a_block_leaves_a_model_that_computes(tmp_path: Path) -> None:
    model = nb_accelerate.disk_offload(Placed(), tmp_path)
    with pytest.raises(RuntimeError, match="shape"):
        model.layers[1](torch.ones(1, 3))
    assert torch.equal(model(tokens()), Placed()(tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("device_map", [{"": "disk"}, {**OFFLOAD, "layers.0": "cpu"}])
def test_compiled_models_have_as_many_graphs_as_plain_ones(tmp_path: Path, device_map: dict[str, Any]) -> None:
    from torch._dynamo.testing import CompileCounter  # a second, and each rank of later launches would import it too

    model, plain = nb_accelerate.dispatch_model(Placed(), device_map, offload_dir=tmp_path), Placed()
    counts = []
    for each in (plain, model):
        torch._dynamo.reset()
        counter = CompileCounter()
        assert torch.equal(torch.compile(each, backend=counter)(tokens()), Placed()(tokens()))
        counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]


def test_adapters_that_are_added_afterwards_train(tmp_path: Path) -> None:
    model, plain = nb_accelerate.disk_offload(Placed(), tmp_path), Placed()
    for each in (model, plain):
        each.requires_grad_(False)
        torch.manual_seed(1)
        each.layers[1].up = LoRA(each.layers[1].up)
        each.head = LoRA(each.head)
        each(tokens()).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    assert model.head.a.weight.grad is not None


@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.cuda(), lambda model: model.cpu()])
def test_a_placed_model_is_not_moved(tmp_path: Path, move: Any) -> None:
    model = nb_accelerate.dispatch_model(Placed(), OFFLOAD, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="remove_hook_from_submodules"):
        move(model)
    assert model.to(torch.float64).scale.dtype is torch.float64
    assert torch.equal(model(tokens()), Placed().to(torch.float64)(tokens()))


def test_weights_that_are_loaded_into_a_placed_model_count(tmp_path: Path) -> None:
    model = nb_accelerate.disk_offload(Placed(), tmp_path)
    model.load_state_dict(Placed(seed=5).state_dict())
    model.table = Placed(seed=5).table
    assert torch.equal(model(tokens()), Placed(seed=5)(tokens()))


def test_a_model_can_be_placed_anew_from_the_files_it_is_in(tmp_path: Path) -> None:
    """As peft does it: hooks are removed, and the model is dispatched again without a folder."""
    model = nb_accelerate.disk_offload(Placed(), tmp_path)
    remove_hook_from_submodules(model)
    nb_accelerate.dispatch_model(model, OFFLOAD)
    assert torch.equal(model(tokens()), Placed()(tokens()))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_second_map_takes_the_place_of_the_first_and_hooks_of_others_stay(tmp_path: Path) -> None:
    model, want = nb_accelerate.disk_offload(Placed(), tmp_path / "a"), Placed()(tokens())
    nb_accelerate.hooks.add_hook_to_module(model.norm, nb_accelerate.hooks.ModelHook(), append=True)
    for device_map in (OFFLOAD, {"": "cpu", "layers": "disk"}):
        model = nb_accelerate.dispatch_model(model, device_map, offload_dir=tmp_path / "b")
        assert torch.equal(model(tokens()), want)
        assert type(model.layers[0]._hf_hook) is AlignDevicesHook
    assert not list(tmp_path.glob("b/*.safetensors")), "they were in files already"
    model = nb_accelerate.dispatch_model(model, {"": "cpu"})
    assert type(vars(model.norm).pop("_hf_hook")) is nb_accelerate.hooks.ModelHook
    del model.norm._old_forward, model.norm.forward
    assert _is_plain(model)
    assert torch.equal(model.to("cpu")(tokens()), want)


def test_models_without_weights_can_be_placed(tmp_path: Path) -> None:
    for place in (lambda model: nb_accelerate.disk_offload(model, tmp_path), nb_accelerate.cpu_offload):
        model: nn.Module = place(nn.Sequential(nn.ModuleList(), nn.ReLU())[1:])
        assert model(torch.ones(1)).item() == 1
    model = nb_accelerate.dispatch_model(nn.Sequential(), {"": "disk"})
    assert model(torch.ones(1)).item() == 1


def test_forced_hooks_are_those_of_a_model_on_several_devices() -> None:
    model = nb_accelerate.dispatch_model(Placed(), {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.io_same_device
    assert torch.equal(model(tokens()), Placed()(tokens()))


# --- bad input, with accelerate's types of errors


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"layers": "cpu"}, "device for scale, embedding.weight"),
        (OFFLOAD, "offload_dir"),
        ({"": 7}, "process sees no device 7"),
        ({"": "nonsense"}, "sees no device 'nonsense'"),
    ],
)
def test_maps_that_cannot_be_have_errors_of_accelerates_types(device_map: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        accelerate.dispatch_model(Placed(), device_map)
    with pytest.raises(theirs.type, match=said):
        nb_accelerate.dispatch_model(Placed(), device_map)


def test_a_word_is_no_map_and_the_error_says_who_takes_words() -> None:
    with pytest.raises(ConfigError, match="load_checkpoint_and_dispatch takes words"):
        nb_accelerate.dispatch_model(Placed(), "auto")  # type: ignore[arg-type]
    with pytest.raises(PlacedModelError, match="sees no device 'cuda:77'"):
        nb_accelerate.dispatch_model(Placed(), {"": "cuda:77"})


def test_a_weight_that_no_file_has_is_named() -> None:
    with init_empty_weights():
        model = Placed()
    with pytest.raises(ValueError, match=r"\w+ has no numbers"):
        nb_accelerate.dispatch_model(model, {"": "disk"}, offload_index={})


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    nb_accelerate.disk_offload(Placed(width=4), tmp_path)
    with init_empty_weights():
        wider = Placed(width=8)
    with pytest.raises(ValueError, match=r"scale .*has the shape"):
        nb_accelerate.disk_offload(wider, tmp_path)


def test_too_little_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: full)
    with pytest.raises(RuntimeError, match="Nothing was written"):
        nb_accelerate.disk_offload(Placed(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_that_are_cut_off_are_an_error(tmp_path: Path) -> None:
    model = nb_accelerate.disk_offload(Placed(width=64), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    weights, plain = dict(model.state_dict()), Placed(width=64)
    for name in ("scale", "embedding.weight"):
        plain.get_submodule(name.rpartition(".")[0]).get_parameter(name.rpartition(".")[2]).data = weights[name]
    with file.open("r+b") as cut:
        cut.truncate(1000)
    accelerator = nb_accelerate.Accelerator(cpu=True)
    for read in (
        lambda: model(tokens()),
        model.state_dict,
        model.layers[1].state_dict,
        lambda: accelerator.get_state_dict(plain),
        lambda: accelerator.save_model(plain, tmp_path / "a"),
        lambda: accelerator.save(weights, tmp_path / "b"),
        lambda: nb_accelerate.dispatch_model(plain, {"": "cpu"}),
    ):
        with pytest.raises(CheckpointError, match="cut off"):
            read()
    assert list(model.state_dict(keep_vars=True))  # to load others
    remove_hook_from_submodules(model)
    assert list(model.state_dict())  # a plain one again


def test_names_that_a_model_leaves_out_of_maps_are_left_where_they_are(tmp_path: Path) -> None:
    """Where transformers replaces ``check_device_map`` of ``big_modeling`` for a while."""
    model = Placed()
    model._no_placement_params = ["scale"]
    device_map = {name: place for name, place in OFFLOAD.items() if name != "scale"}
    nb_accelerate.dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(model(tokens()), Placed()(tokens()))
    assert big_modeling.dispatch_model is nb_accelerate.dispatch_model


class Sharing(nn.Module):
    """A model whose modules have several names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.between = nn.Linear(4, 4)
        self.second = self.first
        self.last = nn.ModuleList([self.first[2], nn.Linear(4, 4), self.first[1]])

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.second(self.between(self.first(inputs)))
        for layer in self.last:
            hidden = layer(hidden)
        return hidden


def test_modules_with_several_names_are_split_over_places(tmp_path: Path) -> None:
    inputs, seen = torch.ones(2, 4), set()
    for limit in range(0, 500, 40):
        model = Sharing().eval()
        want = model(inputs)
        device_map = nb_accelerate.infer_auto_device_map(model, {"cpu": limit})
        seen.add(device_map.get("second") or device_map.get("second.0"))
        nb_accelerate.dispatch_model(model, device_map, offload_dir=tmp_path / str(limit))
        assert torch.equal(model(inputs), want)
        assert model.last[0].weight is model.first[2].weight
    assert seen == {None, "cpu"}
