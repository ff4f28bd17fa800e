"""Replace the parameters of a model by shards: weights of rank 0, policies, what stays whole; cut and join tensors."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm import operations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.comm import Collectives


def shard_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the optimizer state of one parameter, with what is of its shape sharded as it is."""
    return {
        name: shard_like(value, parameter) if getattr(value, "shape", None) == parameter.shape else value
        for name, value in state.items()
    }


def shard_like(value: Any, like: Any) -> Any:
    """Return this rank's shard of a tensor that all ranks have whole, sharded like another one. Exchanges nothing.

    It is returned as it is where one of them is no tensor, or the other one no DTensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    mesh = like.device_mesh
    whole = DTensor.from_local(value.detach().to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def gather_whole(value: Any, *, keep: bool) -> Any:
    """Return a copy of a tensor, whole and in host memory; None if it is not to be kept. Collective for a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor):
        # Shards that were offloaded come to the device: NCCL takes no tensors of the host.
        gathered: Any = value.detach().to(value.device_mesh.device_type)
        # One dimension of the mesh after the other: ``full_tensor`` does the same, and logs a warning for each mesh of
        # several. Those that were sharded last come first: strided ones, which FSDP makes of what tensor parallelism
        # has sharded, and then from the right.
        placements = list(gathered.placements)
        split = [dim for dim in reversed(range(len(placements))) if not placements[dim].is_replicate()]
        for dim in sorted(split, key=lambda dim: not hasattr(placements[dim], "split_factor")):
            placements[dim] = Replicate()
            gathered = gathered.redistribute(placements=placements)
        return gathered.to_local().cpu() if keep else None
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone() if keep else None
    return value


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is this rank's part of a larger one."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of a plain tensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(placement: Any) -> bool:
    """Return whether ranks along a dimension of a mesh hold different parts. ``is_shard`` leaves out strided ones."""
    return not placement.is_replicate() and not placement.is_partial()


def settled(gradient: Any) -> Any:
    """Return a gradient without sums that are still to be taken over ranks. Collective if there are some."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(gradient, DTensor):
        return gradient
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=placements) if placements != list(gradient.placements) else gradient


SHARDED_AS = "_sharded_as"
"""An attribute of parameters that were replaced by shards: the parameter that is trained in their place."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called for a module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


class Policies:
    """The `MixedPrecisionPolicy` of blocks, of the rest of the model, and of what computes in float32 anyway.

    Autocast surrounds the forward of the model, and converts what is not in its dtype where an operation needs it. So
    the inputs of the model stay as they are: targets, say, would lose digits.
    """

    def __init__(self, options: FullyShardedDataParallelPlugin, dtype: torch.dtype | None) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = options.mixed_precision_policy
        if policy is not None:
            self.of_blocks = self.of_root = policy
        elif dtype is not None:
            self.of_blocks = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            self.of_root = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        else:
            self.of_blocks = self.of_root = MixedPrecisionPolicy()
        self.precise = MixedPrecisionPolicy(cast_forward_inputs=False)
        self.converts = self.of_blocks.param_dtype not in {None, torch.float32}


def kept_precise(block: nn.Module, converts: bool) -> Iterator[nn.Module]:
    """Yield the parts that compute in float32 in every precision: torch refuses batch norm with 16-bit weights."""
    for part in block.modules():
        is_norm = isinstance(part, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - the base of all of them
        if converts and is_norm and part is not block and not is_sharded(part) and any(True for _ in part.parameters()):
            yield part


def ignored_parameters(model: nn.Module, options: FullyShardedDataParallelPlugin) -> set[nn.Parameter]:
    """Return the parameters that stay whole on every rank: those of ``ignored_modules``, and scalars."""
    parameters = set(model.parameters())
    scalars = {parameter for parameter in parameters if not parameter.dim()}
    chosen = options.ignored_modules
    if chosen is None:
        return scalars
    if isinstance(chosen, str):
        modules: Sequence[nn.Module] = [part for name, part in model.named_modules() if re.fullmatch(chosen, name)]
        if not modules:
            raise ConfigError(f"ignored_modules={chosen!r} matches the name of no part of {type(model).__name__}.")
    else:
        modules = list(chosen)
    return scalars | {parameter for module in modules for parameter in module.parameters() if parameter in parameters}


def check_weights(model: nn.Module, collectives: Collectives) -> None:
    """Refuse a model without weights on rank 0, on all ranks alike."""
    names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    lacking = collectives.broadcast_objects([names[0] if names else None], 0)[0]
    if lacking is not None:
        raise ConfigError(
            f"{lacking} of this {type(model).__name__} is on the device meta on rank 0, so there are no weights to "
            "train. Make the model with its weights on rank 0, and on meta on the others: "
            "with torch.device('meta') if accelerator.process_index else torch.device('cpu'): model = Model()."
        )


class Filler:
    """Gives parts of a model the parameters and buffers of rank 0, in memory of the device, each once."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self._new: dict[Tensor, Tensor] = {}  # in place of those on meta
        self._filled: set[Tensor] = set()

    @torch.no_grad()
    def __call__(self, part: nn.Module) -> None:
        """Fill a part, or the model. What is sharded has its values already. Collective."""
        for module in part.modules():
            tensors = []
            for table in (module._parameters, module._buffers):  # noqa: SLF001 - torch replaces tensors there too
                for name, old in table.items():
                    if old is None or old in self._filled or is_shard(old):
                        continue
                    tensor = table[name] = self._on_device(old)  # type: ignore[assignment]
                    if tensor not in self._filled:
                        self._filled.add(tensor)
                        tensors.append(tensor.detach())
            if tensors:
                for tensor, value in zip(tensors, operations.broadcast(self._collectives, tensors), strict=True):
                    tensor.copy_(value)

    def _on_device(self, old: Tensor) -> Tensor:
        if old.is_meta:
            if old not in self._new:
                empty = torch.empty_like(old, device=self._device)
                self._new[old] = nn.Parameter(empty, old.requires_grad) if isinstance(old, nn.Parameter) else empty
            return self._new[old]
        if old.device != self._device:
            old.data = old.data.to(self._device)
        return old


@contextlib.contextmanager
def note_replaced(model: nn.Module) -> Iterator[None]:
    """Run a block that replaces parameters of a model, and note on the old ones what is trained in their place."""
    before = dict(model.named_parameters(remove_duplicate=False))
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if before[name] is not parameter:
            setattr(before[name], SHARDED_AS, parameter)


class CheckpointedForward:
    """Call the forward of a block; in training, keep its inputs alone, and compute the rest again in its backward.

    It takes the place of ``block.forward``, so that names of parameters stay, and pickles and deep-copies with the
    block.
    """

    def __init__(self, forward: Callable[..., Any], *, offload: bool, kind: DeviceKind) -> None:
        self.__wrapped__ = forward  # inspect.signature follows it to the arguments of the block
        self.offload = offload
        self._device_type, self._pins = kind.name, kind.pins_memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs. Called by the block for each batch."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        kept: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.offload:  # pinned, so that copies to and from the device do not wait
            kept = torch.autograd.graph.save_on_cpu(self._pins, self._device_type)
        with kept:
            return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)
