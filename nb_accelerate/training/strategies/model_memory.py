"""Measure what a process holds in memory for models and optimizers: bytes of storages, each counted once."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from nb_accelerate.base.devices import find_kind
from nb_accelerate.base.progress_page import RankMemory
from nb_accelerate.training.process.live_bytes import tensors_in
from nb_accelerate.training.strategies.unwrapping import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn


def measure(
    models: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    *,
    parameters: Iterable[Tensor] = (),
    gradients: Iterable[Tensor] = (),
    states: Iterable[Tensor] = (),
) -> RankMemory:
    """Return what is held for models and optimizers.

    Args:
        optimizers: those inside of prepared ones. What they train and no model has, such as the float32 weights of an
            engine, counts as their state.
        parameters: tensors that an engine keeps instead of those of the models.
        gradients: likewise.
        states: what an engine keeps for its optimizer, besides the optimizer's own state.
    """
    optimizers = list(optimizers)
    weights = [parameter for model in models for parameter in model.parameters()]
    trained = [weight for weight in weights if weight.requires_grad]
    stepped = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    states = [*states, *stepped]
    grads = [weight.grad for weight in (*trained, *stepped) if weight.grad is not None]
    seen: set[Any] = set()  # what is in the same memory counts once, where it comes first
    of_weights = _bytes([*parameters, *weights], seen)
    of_gradients = _bytes([*gradients, *grads], seen)
    pending = 0 if of_gradients else _bytes([weight for weight in stepped if weight.requires_grad] or trained, set())
    for optimizer in optimizers:
        tensors = tensors_in(list(optimizer.state.values()))
        states += tensors
        if not tensors:
            # The bytes of the state that an optimizer will make at its first step, if it is of a well-known kind.
            total = 0
            for group in optimizer.param_groups:
                copies = 2 + bool(group.get("amsgrad")) if "betas" in group else 1 if group.get("momentum") else 0
                total += copies * _bytes([weight for weight in group["params"] if weight.requires_grad], set())
            pending += total
    return RankMemory(parameters=of_weights, gradients=of_gradients, optimizer=_bytes(states, seen), pending=pending)


def describe_sharding(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return the axes of the mesh of sharded models: ``FSDP, dp_replicate 2 x dp_shard 4``; "" if none is sharded."""
    for tensor in itertools.chain(*map(parameters_of, optimizers), *(model.parameters() for model in models)):
        if _is_shard(tensor):
            mesh: Any = tensor.device_mesh
            names = mesh.mesh_dim_names or tuple(f"axis {number}" for number in range(mesh.ndim))
            axes = " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))
            return f"FSDP, {axes}" if "dp_shard" in names else axes
    return ""


def _bytes(tensors: Iterable[Tensor], seen: set[Any]) -> int:
    """Return the bytes of the memory that tensors are in, and add that memory to what was seen."""
    total = 0
    parts: list[Tensor] = []  # in memory as one block: of a sparse tensor several, of a lazy module none
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            parts += (tensor._indices(), tensor._values())  # noqa: SLF001 - the public ones need it coalesced
        elif tensor.layout is torch.strided and not is_lazy(tensor):
            parts.append(tensor)
    for tensor in parts:
        local = tensor.detach()
        if _is_shard(local):
            local = local.to_local()  # type: ignore[attr-defined]  # of a DTensor
        if local.is_meta:
            continue
        kind = find_kind(local.device.type)
        if kind is not None and kind.has_storages:
            storage = local.untyped_storage()
            key: Any = (local.device, storage.data_ptr())
            size = storage.nbytes()
        else:
            key, size = id(tensor), local.numel() * local.element_size()
        if size and key not in seen:
            seen.add(key)
            total += size
    return total


def _is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which takes a good part of a second."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
