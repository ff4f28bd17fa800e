"""Place a model by a device map: on several devices, in host memory, or in files."""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nb_accelerate.base.devices import find_kind
from nb_accelerate.errors import ConfigError, PlacedModelError
from nb_accelerate.training.bigmodel.align_hook import AlignDevicesHook
from nb_accelerate.training.bigmodel.attach import attach_align_device_hook, attach_align_device_hook_on_blocks
from nb_accelerate.training.bigmodel.device_map import check_device_map
from nb_accelerate.training.bigmodel.hooks import (
    DEVICE_METHODS,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)
from nb_accelerate.training.bigmodel.mapped import WeightFiles, check_files, files_of
from nb_accelerate.training.bigmodel.offloaded import OffloadedWeightsLoader, check_space, save_offload_index
from nb_accelerate.training.bigmodel.tensors import owner_of, tensor_at, tensor_names, with_index
from nb_accelerate.training.bigmodel.ties import (
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    retie_parameters,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence

    from torch import Tensor

    Device = int | str | torch.device


_OWN_FILE = re.compile(r"weights-[0-9a-f]{32}\.safetensors")

_BYTES_OF_FILE = 1 << 30  # of weights in one file: so much is converted to another dtype in memory at once


def weights_in_files(
    weights: Mapping[str, Tensor],
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Tensor]:
    """Return weights as views of files. Weights that no file has are written, except views of other files.

    Args:
        weights: of the model, by name; on ``meta`` where they are in a file only.
        folder: that they are written to. Weights on ``meta`` are found by its ``index.json``.
        index: rows by name, as in ``index.json``, for all weights that it has.

    Returns:
        The weights that are in files, by name. Others rest where they are.

    Raises:
        ConfigError: there is neither a folder nor an index.
        CheckpointError: the disk has too little space, which is found out before anything is written.
    """
    not_on_disk = {name for name, weight in weights.items() if files_of(weight) is None}
    if folder is None and index is None and not_on_disk:
        raise ConfigError(
            f"device_map has {', '.join(sorted(not_on_disk))} on the disk, and these weights are in no file yet. Give "
            "dispatch_model an offload_dir that they are written to."
        )
    rows = index
    if rows is None:
        # index.json may be left over from another model, so it is used only for weights on meta.
        rows = {name: row for name, row in _index_of(folder).items() if name in weights and weights[name].is_meta}
    in_files = _mapped({name: rows[name] for name in weights if name in rows}, folder)
    to_write = {}
    for name, weight in weights.items():
        if name in in_files and in_files[name].dtype != weight.dtype:
            to_write[name] = in_files[name], weight.dtype
        elif name not in in_files and name in not_on_disk and not weight.is_meta:
            to_write[name] = weight, weight.dtype
    if folder is not None and to_write:
        in_files |= _written(to_write, Path(folder))
    return in_files


def _index_of(folder: str | os.PathLike[str] | None) -> Mapping[str, Mapping[str, Any]]:
    file = Path(folder or "") / "index.json"
    return OffloadedWeightsLoader(save_folder=folder).index if folder is not None and file.is_file() else {}


def _mapped(rows: Mapping[str, Mapping[str, Any]], folder: str | os.PathLike[str] | None) -> dict[str, Tensor]:
    files = WeightFiles(
        dict.fromkeys(Path(row["safetensors_file"]) for row in rows.values() if row.get("safetensors_file"))
    )
    others = OffloadedWeightsLoader(save_folder=folder, index=rows)
    weights = {}
    for name, row in rows.items():
        source = row.get("weight_name", name)
        is_mapped = source in files and files.entry(source).file == Path(row.get("safetensors_file") or "")
        weights[name] = files[source] if is_mapped else others[name]
    return weights


def _written(weights: Mapping[str, tuple[Tensor, torch.dtype]], folder: Path) -> dict[str, Tensor]:
    """Write weights, each in a dtype, and return them as views of what was written. Files that they replace go."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: weight.numel() * dtype.itemsize for name, (weight, dtype) in weights.items()}
    check_space(folder, sum(sizes.values()))
    first: dict[tuple[int, torch.dtype], str] = {}  # name of weights that are tied to each other
    for name, (weight, dtype) in weights.items():
        first.setdefault((id(weight), dtype), name)
    files: list[list[str]] = [[]]
    for name in first.values():
        if sum(sizes[each] for each in files[-1]) > _BYTES_OF_FILE:
            files.append([])
        files[-1].append(name)
    rows: dict[str, Any] = {}
    for names in files:
        file = folder.absolute() / f"weights-{uuid.uuid4().hex}.safetensors"  # beside those of other calls and ranks
        part = {name: weights[name][0].detach().to("cpu", weights[name][1]).contiguous().clone() for name in names}
        save_file(part, file)
        for name in names:
            dtype_name = str(weights[name][1]).removeprefix("torch.")
            rows[name] = {"safetensors_file": str(file), "weight_name": name, "dtype": dtype_name}
    rows |= {name: rows[first[id(weight), dtype]] for name, (weight, dtype) in weights.items()}
    written = _mapped(rows, folder)
    _replace_rows(rows, folder)
    return written


def _replace_rows(rows: Mapping[str, Any], folder: Path) -> None:
    """Put rows into the index of a folder, and remove files of ours that it does not name any more."""
    before = _index_of(folder)
    save_offload_index(rows, folder)
    after = {row.get("safetensors_file") for row in _index_of(folder).values()}
    for old in {str(row.get("safetensors_file")) for row in before.values()} - after:
        if Path(old).parent == folder.absolute() and _OWN_FILE.fullmatch(Path(old).name):
            with contextlib.suppress(OSError):  # Windows keeps a file that is mapped; elsewhere its maps stay
                Path(old).unlink()


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model by a device map, and return it.

    Modules that the map has on a GPU stay there. Modules on ``"cpu"`` or ``"disk"`` are computed on the main device:
    each block is copied there while the block before computes. Without a GPU the CPU computes everything, and maps the
    files of modules on ``"disk"``, so that nothing is copied. A model that is on one device as a whole gets no hooks.

    While the model does not compute, ``model.state_dict()`` has the numbers of all weights.
    `remove_hook_from_submodules` makes a plain model of it again. Gradients are computed for weights that stay on
    their device, and for all that the CPU computes.

    Examples:
        ```python
        device_map = infer_auto_device_map(model, max_memory={0: "10GiB", "cpu": "30GiB"})
        model = dispatch_model(model, device_map)
        ```

    Args:
        model: changed in place. If it is placed already, this takes the place of that.
        device_map: devices by names of modules and tensors, ``""`` for the whole model; ``"disk"`` is one.
        main_device: where what visits is computed, and where inputs go first. By default the first GPU of the map.
        state_dict: weights of parts on the ``"cpu"``, by their names in the model. By default what they are now.
        offload_dir: where weights of parts on the ``"disk"`` are written that no file has. Safetensors files that the
            model was loaded from are used as they are; weights on ``meta`` are found by the folder's ``index.json``.
        offload_index: what is in files, in place of ``index.json``: ``safetensors_file`` and ``weight_name`` by name.
        offload_buffers: buffers of a state dict visit too. By default they stay on the device that computes.
        skip_keys: keyword arguments, and keys of outputs, that are not moved between devices.
        preload_module_classes: names of further classes whose modules are one block.
        force_hooks: attach hooks, which move inputs, to a model on one device too.

    Raises:
        ConfigError: parts have no device; or weights have no numbers, or other shapes in files.
        PlacedModelError: this machine has no such device.
        CheckpointError: the disk has too little space, or a file is damaged.
    """
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f"device_map={device_map!r} is no map of names to devices. infer_auto_device_map(model) makes one, and "
            "load_checkpoint_and_dispatch takes words such as 'auto'."
        )
    # transformers leaves these out of its maps on purpose, and replaces ``accelerate.big_modeling.check_device_map``
    # for a while. That does nothing here, because a lower module cannot look a name up there.
    left_out = dict.fromkeys(getattr(model, "_no_placement_params", None) or (), "cpu")
    check_device_map(model, {**device_map, **left_out})
    check_files(tensor_at(model, name) for name in tensor_names(model))
    places: dict[str, Any] = {name: "disk" if at == "disk" else with_index(at) for name, at in device_map.items()}
    _remove_placement(model)
    devices = list(dict.fromkeys(places.values()))
    if len(devices) > 1 or "disk" in devices or force_hooks:
        cpu = torch.device("cpu")
        first = next((device for device in devices if device not in ("disk", cpu)), cpu)
        main = first if main_device is None else with_index(main_device)
        kind = find_kind(main.type)
        not_computing = ("disk",) if kind is not None and kind.uses_host_memory else ("disk", cpu)
        offload = {name: place in not_computing for name, place in places.items()}
        computing = {name: main if offload[name] else place for name, place in places.items()}
        _separate_ties(model, computing)
        ties = find_tied_parameters(model)
        on_disk = [name for name in tensor_names(model) if device_of(name, places, "") == "disk"]
        to_offload = _tensors_to_offload(model, on_disk, offload_buffers=offload_buffers)
        in_files = weights_in_files(to_offload, offload_dir, offload_index) if to_offload else {}
        attach_align_device_hook_on_blocks(
            model,
            {"": main, **computing},
            offload,
            {**(state_dict or {}), **in_files},
            offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
        )
        retie_parameters(model, ties)
        model.to = functools.partial(_to, model)  # type: ignore[method-assign]
        for name in DEVICE_METHODS:
            if hasattr(model, name):
                setattr(model, name, functools.partial(_refuse_move, name))
    elif any(tensor_at(model, name).device != devices[0] for name in tensor_names(model)):
        model.to(devices[0])
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _remove_placement(model: nn.Module) -> None:
    """Take away hooks that placed a model before. Those of others stay."""
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        hooks = hook.hooks if isinstance(hook, SequentialHook) else () if hook is None else (hook,)
        others = [each for each in hooks if not isinstance(each, AlignDevicesHook)]
        if len(others) < len(hooks):
            remove_hook_from_module(module)
            for other in others:
                add_hook_to_module(module, other, append=True)


def _separate_ties(model: nn.Module, computing: Mapping[str, torch.device]) -> None:
    """Make a parameter with names on several devices one for each of them, which is said in the log."""
    groups = find_tied_parameters(model)
    check_tied_parameters_on_same_device(groups, computing)
    for group in groups:
        shared = tensor_at(model, group[0])
        made: dict[Any, Tensor] = {}
        for name in group:
            device = device_of(name, computing)
            if device not in made:
                made[device] = nn.Parameter(shared.detach(), shared.requires_grad) if made else shared
            setattr(*owner_of(model, name), made[device])


def _tensors_to_offload(model: nn.Module, names: Sequence[str], *, offload_buffers: bool) -> dict[str, Tensor]:
    """Return those tensors that are in files: parameters, and saved buffers if asked for or if they are on ``meta``."""
    parameters, saved = {name for name, _ in model.named_parameters(remove_duplicate=False)}, model.state_dict().keys()
    tensors = {name: tensor_at(model, name) for name in names}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in parameters or (name in saved and (offload_buffers or tensor.is_meta))
    }


def _to(model: Any, *args: Any, **kwargs: Any) -> Any:
    device = torch._C._nn._parse_to(*args, **kwargs)[0]  # noqa: SLF001 - as torch itself reads these arguments
    return type(model).to(model, *args, **kwargs) if device is None else _refuse_move("to", device)


def _refuse_move(method: str, *args: Any, **_: Any) -> Any:
    raise PlacedModelError(
        f"model.{method}({', '.join(map(repr, args))}) would move a model whose parts dispatch_model has placed. "
        "Before that, or before another dispatch_model(model, device_map), write: "
        "nb_accelerate.hooks.remove_hook_from_submodules(model)"
    )


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep a model in host memory, compute it on a device block by block, and return it. On the CPU nothing changes.

    Examples:
        ```python
        model = cpu_offload(model, "cuda")
        ```

    Args:
        model: changed in place.
        execution_device: where it computes, by default the device it is on.
        offload_buffers: as for `dispatch_model`.
        state_dict: what its weights are, by name. By default what they are now.
        preload_module_classes: as for `dispatch_model`.
    """
    if state_dict is None and _device(model, execution_device).type == "cpu":
        return model.to("cpu")
    return _offload(model, execution_device, state_dict, offload_buffers, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep a model in files, compute it on a device block by block, and return it.

    Examples:
        ```python
        model = disk_offload(model, "offloaded", "cuda")
        ```

    Args:
        model: changed in place.
        offload_dir: where its weights are written to; those on ``meta`` are there, by the folder's ``index.json``.
        execution_device: where it computes, by default the device it is on.
        offload_buffers: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.

    Raises:
        CheckpointError: the disk has too little space, or a file is damaged.
    """
    to_offload = _tensors_to_offload(model, tensor_names(model), offload_buffers=offload_buffers)
    weights = weights_in_files(to_offload, offload_dir, None)
    return _offload(model, execution_device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    execution_device: Device | None,
    weights: Mapping[str, Tensor] | None,
    offload_buffers: bool,
    preload_module_classes: Collection[str] | None,
) -> nn.Module:
    device = _device(model, execution_device)
    _remove_placement(model)
    ties = find_tied_parameters(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model, device, True, weights, offload_buffers, preload_module_classes=preload_module_classes
    )
    retie_parameters(model, ties)
    return model


def _device(model: nn.Module, given: Device | None) -> torch.device:
    if given is not None:
        return with_index(given)
    return next((tensor_at(model, name).device for name in tensor_names(model)), torch.device("cpu"))
