"""Load a model and place it, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.training.bigmodel.device_map import planned_map
from nb_accelerate.training.bigmodel.device_memory import limits_for
from nb_accelerate.training.bigmodel.dispatch import dispatch_model
from nb_accelerate.training.checkpoint.model import fit, load_checkpoint_in_model, weight_files
from nb_accelerate.training.checkpoint.placing import Checkpoint, plan
from nb_accelerate.training.strategies.tensor_parallel import take_slices

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch import nn

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
        _take_slices(model, checkpoint, dtype, strict=strict)
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


def _take_slices(
    model: nn.Module, checkpoint: str | os.PathLike[str], dtype: str | torch.dtype | None, *, strict: bool
) -> None:
    files = Checkpoint(weight_files(checkpoint))
    steps = plan(files, model.state_dict(keep_vars=True), {"": "cpu"}, dtype, ())
    tensors = {name: tensor for part in files.parts() for name, tensor in part.items()}
    dtypes = {name: step.dtype for name, step in steps.items()}
    take_slices(model, fit(tensors, model, str(checkpoint), strict=strict), dtypes)
