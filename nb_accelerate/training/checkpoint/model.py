"""The weights of a model: in one file or several, under the names that the model has for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.bigmodel.device_map import planned_map
from nb_accelerate.training.bigmodel.device_memory import limits_for
from nb_accelerate.training.bigmodel.dispatch import dispatch_model
from nb_accelerate.training.bigmodel.tensors import with_index
from nb_accelerate.training.bigmodel.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    device_of,
    find_tied_parameters,
    is_of_transformers,
    retie_parameters,
)
from nb_accelerate.training.checkpoint.files import (
    clean_state_dict_for_safetensors,
    id_tensor_storage,
    load_state_dict,
    write,
)
from nb_accelerate.training.checkpoint.fitting import check_shapes
from nb_accelerate.training.checkpoint.names import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
    is_plain,
)
from nb_accelerate.training.checkpoint.placing import Checkpoint, check_folder, convert_others, place, plan, scales_of
from nb_accelerate.training.checkpoint.publishing import Staging, published, sync_all
from nb_accelerate.training.strategies.tensor_parallel import take_slices

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set as AbstractSet

    from torch import Tensor, nn


logger = logging.getLogger("nb_accelerate")


def write_model(
    state_dict: Mapping[str, Tensor],
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    safe_serialization: bool,
) -> None:
    """Write the weights of a model into a folder; they replace the weights there."""
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = clean_state_dict_for_safetensors(state_dict) if safe_serialization else dict(state_dict)
    name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
    parts = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    split = split_torch_state_dict_into_shards(tensors, filename_pattern=parts, max_shard_size=max_shard_size)
    staging = Staging.begin(folder, "model")
    try:
        for file, names in (split.filename_to_tensors or {name: []}).items():
            part = {name: tensors[name] for name in names}
            write(part, staging.path / file, safe_serialization=safe_serialization)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (staging.path / f"{name}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        sync_all(staging.path)
        staging.publish()
    finally:
        staging.discard()


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001 - accelerate's
    offload_buffers: bool = False,  # noqa: ARG001 - accelerate's
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,  # noqa: ARG001 - accelerate's
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights into a model, each to its device.

    Weights on ``"cpu"`` and ``"disk"`` are views of safetensors files: nothing is read or written, the system keeps in
    memory what is used, and several processes share it. Files may be removed or replaced meanwhile, and must not be
    changed in place.

    Args:
        model: the user's, unwrapped; may be on ``meta``.
        checkpoint: a file, an index of several, or a folder with either.
        device_map: devices by the names of modules, ``""`` for all. Every weight needs one, and goes there; without
            a map they are copied to where they are, and from ``meta`` to the CPU.
        offload_folder: what weights on ``"disk"`` are written to if the files have another dtype, or are not
            safetensors.
        dtype: which weights are to have; by default the model's. Used with a ``device_map``.
        offload_state_dict: changes nothing: what is on the CPU takes no memory before it is used.
        offload_buffers: changes nothing: buffers on ``"disk"`` are views like parameters.
        keep_in_fp32_modules: parts of names of weights that stay float32 where ``dtype`` is float16.
        offload_8bit_bnb: changes nothing: weights on ``"cpu"`` and ``"disk"`` stay as they are in their files.
        strict: whether names have to be the same; else lines say which weights the checkpoint lacks, whose numbers stay
            as they are (in ``dtype``), and what was not used.
        full_state_dict: whether the file holds whole tensors, as all files that `Accelerator.save_model` writes do.
        broadcast_from_rank0: read on rank 0, and send what was read to the others. All ranks call it together.

    Raises:
        CheckpointError: there are no weights, a file is missing or cut off, shapes differ, no file has a weight that is
            on ``meta``, names differ and ``strict``, or the disk has too little space for what is to be written.
        ConfigError: ``device_map`` has no device for a weight, or something is to be written and there is no
            ``offload_folder``.
        PlacedModelError: this machine has no such device.
    """
    if broadcast_from_rank0 or not full_state_dict:
        _load_distributed(model, checkpoint, strict=strict, full=full_state_dict, broadcast=broadcast_from_rank0)
        return
    if device_map is None and any(parameter.is_meta for parameter in model.parameters()):
        device_map = {"": "cpu"}
    # Everything is checked before anything changes.
    now, tied = model.state_dict(keep_vars=True), find_tied_parameters(model)
    if device_map is not None:
        for name in now:
            device_of(name, device_map)
        for device in device_map.values():
            if device != "disk":
                with_index(device)
        check_tied_parameters_on_same_device(tied, device_map)
    files = Checkpoint(weight_files(checkpoint))
    names: set[str] = set()
    for file, content in files.contents.items():
        check_shapes(str(file), {name: getattr(like, "shape", None) for name, like in content.items()}, model, now)
        names |= content.keys() - {scales_of(name) for name in content}
    if strict:
        _compare(names, model, str(checkpoint), strict=True)
    if device_map is None:
        for file in files.contents:  # one by one, for models that fill memory
            model.load_state_dict(load_state_dict(file), strict=False)
        _compare(names, model, str(checkpoint), strict=strict)
        return
    _check_empty(names, model, now, str(checkpoint))
    float32 = keep_in_fp32_modules or ()
    steps = plan(files, now, device_map, dtype, float32)
    check_folder(steps.values(), offload_folder)
    place(files, model, steps, offload_folder)
    convert_others(model, steps, dtype, float32)
    retie_parameters(model, tied)
    _compare(names, model, str(checkpoint), strict=strict)  # once more: on `meta` it is not known which are tied


def _check_empty(names: AbstractSet[str], model: nn.Module, now: Mapping[str, Any], source: str) -> None:
    """Refuse a checkpoint without a weight that has no numbers yet. Of names that are tied, one is enough."""
    filled = {id(now[name]) for name in names if name in now}
    empty = [name for name, value in now.items() if getattr(value, "is_meta", False) and id(value) not in filled]
    if not empty:
        return
    kind, unused = type(model).__name__, names - now.keys()
    message = (
        f"{source} has no {_some(empty)}, and this {kind} has no numbers for them either: they are on meta. Give all "
        "files of the checkpoint: their folder, or their index."
    )
    if unused:
        message = (
            f"{source} names weights otherwise than this {kind}. It has {_some(unused, 2)}; the model, which has no "
            f"numbers for them yet, has {_some(empty, 2)}. "
        )
        message += (
            f"transformers converts names when it loads: {kind}.from_pretrained({source!r}, device_map='auto')."
            if is_of_transformers(model)
            else "Make the model as it was when it was saved."
        )
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        message += " If the weights are tied, call model.tie_weights() before."
    raise CheckpointError(message)


def weight_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files that hold the weights of one model."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        path = published(path, "model")
        # Whole files first, as accelerate looks for them.
        for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME):
            if (path / name).exists():
                path = path / name
                break
        else:
            indices = list(path.glob("*.index.json"))
            if len(indices) != 1:
                what = "several files" if indices else "no file"
                raise CheckpointError(
                    f"In {path} there is neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, and {what} "
                    "*.index.json. Give the file itself."
                )
            path = indices[0]
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    if path.suffix != ".json":
        return [path]
    try:
        index = json.loads(path.read_text())
        names = sorted(set(index.get("weight_map", index).values()))
        odd = [name for name in names if not is_plain(name)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not the index of a checkpoint, it may have been cut off: {error}") from error
    if odd:
        raise CheckpointError(f"{path} names {odd[0]!r}, which is no file in its folder.")
    files = [path.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path} names files that are not there: {', '.join(missing)}.")
    return files


def fit(tensors: Mapping[str, Tensor], model: nn.Module, source: str, *, strict: bool) -> dict[str, Tensor]:
    """Return tensors under the names that a model has for them now; with ``strict``, none may be missing or left over.

    A model that is wrapped (``module.``) or compiled (``_orig_mod.``) has other names than it had when it was saved on
    another number of ranks. Of names that are tied, one is enough.
    """
    now = model.state_dict()
    if tensors.keys() - now.keys():
        names = {_plain(name): name for name in now}
        ways = [{way(_plain(name)): tensor for name, tensor in tensors.items()} for way in _WRAPPED_OTHERWISE]
        best = max(ways, key=lambda way: len(way.keys() & names.keys()))
        tensors = {names.get(name, name): tensor for name, tensor in best.items()}
    if strict:
        _compare(tensors.keys(), model, source, strict=True)
    return dict(tensors)


def _compare(saved: AbstractSet[str], model: nn.Module, source: str, *, strict: bool) -> None:
    now = model.state_dict(keep_vars=True)  # of sharded weights, tied ones are known by their identity
    here = {id_tensor_storage(now[name]) for name in saved if name in now and isinstance(now[name], torch.Tensor)}
    missing = {
        name
        for name in now.keys() - saved
        if not isinstance(now[name], torch.Tensor) or id_tensor_storage(now[name]) not in here
    }
    extra = set(saved - now.keys())
    wrapped = getattr(model, "module", None)
    if isinstance(wrapped, torch.nn.Module) and all(name.startswith("module.") for name in now):
        # Users know their model and its names, and not those of DistributedDataParallel.
        model = wrapped
        missing, extra = ({name.removeprefix("module.") for name in names} for names in (missing, extra))
    kind = type(model).__name__
    if strict and (missing or extra):
        raise CheckpointError(
            f"{source} does not fit this {kind}."
            + (f" It lacks {_some(missing)}." if missing else "")
            + (f" It has {_some(extra)}, which the model has not." if extra else "")
            + " Make the model as it was when it was saved, or write strict=False."
        )
    if missing:
        logger.warning(
            "%s has no %s: this %s keeps its own. If they were trained, give all files of the checkpoint.",
            source,
            _some(missing),
            kind,
        )
    if extra:
        logger.warning(
            "Some weights of %s were not used when this %s was loaded, which does not have them: %s.",
            source,
            kind,
            _some(extra),
        )


def _some(names: Iterable[str], number: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:number]) + (f" and {len(ordered) - number} more" if len(ordered) > number else "")


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


# A model may have a part that is called ``module``, so the prefix alone does not tell.
_WRAPPED_OTHERWISE: tuple[Callable[[str], str], ...] = (
    str,
    "module.{}".format,
    lambda name: name.removeprefix("module."),
)


def _load_distributed(
    model: nn.Module, checkpoint: str | os.PathLike[str], *, strict: bool, full: bool, broadcast: bool
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    reads = not broadcast or torch.distributed.get_rank() == 0
    tensors: dict[str, Any] = {}
    for file in weight_files(checkpoint) if reads else ():
        tensors |= load_state_dict(file)
    options = StateDictOptions(full_state_dict=full, strict=strict, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, tensors, options=options)


_RANKS = "ranks"


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load weights into a model, place it by a device map, and return it.

    What is not on a GPU stays in the files of the checkpoint, if they are safetensors: loading reads none of it.

    Examples:
        ```python
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        model = load_checkpoint_and_dispatch(model, folder, device_map="auto", dtype=torch.float16)
        ```

    Args:
        model: changed in place; may be on ``meta``.
        checkpoint: a file, an index of several, or a folder with either.
        device_map: devices by the names of modules, or the way to make such a map: ``"auto"``, ``"balanced"``,
            ``"balanced_low_0"`` or ``"sequential"``. None to load the weights and place nothing. Or ``"ranks"``, for
            inference: all ranks call this function, and later the model with the same inputs, and compute each layer
            together. The plan of the model (``_tp_plan``) says which weights are sliced; each rank loads its slices,
            and all other weights. Results are those of the whole model up to rounding.
        max_memory: for a map that is made, as for `get_max_memory`.
        no_split_module_classes: for a map that is made, names of classes whose modules stay whole; None for
            ``model._no_split_modules``.
        offload_folder: as for `load_checkpoint_in_model`.
        offload_buffers: whether buffers of what is off the GPU visit it as parameters do. By default they stay there.
        dtype: as for `load_checkpoint_in_model`.
        offload_state_dict: changes nothing, as for `load_checkpoint_in_model`.
        skip_keys: as for `dispatch_model`.
        preload_module_classes: as for `dispatch_model`.
        force_hooks: as for `dispatch_model`.
        strict: as for `load_checkpoint_in_model`.
        full_state_dict: as for `load_checkpoint_in_model`.
        broadcast_from_rank0: as for `load_checkpoint_in_model`.

    Raises:
        CheckpointError: there are no weights, or they do not fit, as for `load_checkpoint_in_model`.
        ConfigError: ``device_map`` is another word, or misses a weight; or it is ``"ranks"``, and the model has no
            plan, or one that cannot be split over as many ranks.
        PlacedModelError: this machine has no such device.
    """
    if device_map == _RANKS:
        files = Checkpoint(weight_files(checkpoint))
        steps = plan(files, model.state_dict(keep_vars=True), {"": "cpu"}, dtype, ())
        tensors = {name: tensor for part in files.parts() for name, tensor in part.items()}
        dtypes = {name: step.dtype for name, step in steps.items()}
        take_slices(model, fit(tensors, model, str(checkpoint), strict=strict), dtypes)
        return model
    if isinstance(device_map, str):
        device_map = planned_map(
            model,
            limits_for(max_memory),
            device_map,
            no_split_module_classes=no_split_module_classes,
            offload_buffers=offload_buffers,
            dtype=dtype,
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
