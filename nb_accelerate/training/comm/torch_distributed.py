"""Collectives on the default process group of torch.distributed."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import ParamSpec, override

from nb_accelerate.base.progress_page import Collective, here
from nb_accelerate.errors import CollectiveMismatchError, ConfigError
from nb_accelerate.training.comm.collectives import Collectives
from nb_accelerate.training.pytree import paths_of_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm.collectives import ReduceOp


P = ParamSpec("P")
T = TypeVar("T")

# torch 2.13 renamed all_gather_into_tensor, and warns at each call of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def shows(collective: Collective) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method so that the rank's progress shows which collective it waits in.

    After a failure it keeps showing the collective, as the place of the failure.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def reported(*args: P.args, **kwargs: P.kwargs) -> T:
            page = here()
            before = page.wait_in(collective)
            try:
                value = method(*args, **kwargs)
            except ValueError as error:
                if dist.is_initialized():
                    raise
                raise ConfigError(
                    f"{collective.name} needs the process group, which end_training() has closed. Call end_training() "
                    "last; or go on with a new Accelerator()."
                ) from error
            page.enter(before)
            return value

        return reported

    return decorate


class TorchCollectives(Collectives):
    """Run the collectives of torch.distributed.

    Tensors on another device are copied to this rank's: a backend such as nccl takes tensors of one kind of device
    only, and for a device of another number it would connect ranks again, two of them by the same device. For barriers,
    nccl takes ``device_ids``, gloo takes None.
    """

    def __init__(self, device: torch.device, *, device_ids: list[int] | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self._device_ids = device_ids

    @override
    @shows(Collective.all_gather)
    def all_gather(self, tensor: Tensor) -> Tensor:
        sent = self._on_device(tensor)
        # Flat: gloo expects dimension 0 of the output to be world_size times the input's, which scalars lack.
        gathered = torch.empty(self.world_size * sent.numel(), dtype=sent.dtype, device=sent.device)
        _all_gather(gathered, sent.reshape(-1))
        return gathered.view(self.world_size, *sent.shape).to(tensor.device)

    @override
    @shows(Collective.all_reduce)
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        reduced = self._on_device(tensor)
        dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return reduced.to(tensor.device)

    @override
    @shows(Collective.broadcast)
    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        received = self._on_device(tensor)
        dist.broadcast(received, source)
        return received.to(tensor.device)

    @override
    @shows(Collective.scatter)
    def scatter(self, parts: Tensor | None, like: Tensor, source: int) -> Tensor:
        received = self._on_device(like)
        rows = None if parts is None else list(self._on_device(parts).unbind(0))
        dist.scatter(received, rows, source)
        return received.to(like.device)

    @override
    @shows(Collective.all_gather_object)
    def all_gather_object(self, item: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, item)
        return gathered

    @override
    @shows(Collective.broadcast_object)
    def broadcast_objects(self, items: list[Any], source: int) -> list[Any]:
        received = list(items)
        dist.broadcast_object_list(received, source)
        return received

    @override
    @shows(Collective.barrier)
    def barrier(self) -> None:
        dist.barrier(device_ids=self._device_ids)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)  # itself if it is there


TensorSpec = tuple[tuple[int, ...], str]  # shape and name of the dtype

_ANY_SIZE = -1  # in a shape: the size may differ between ranks


class CheckedCollectives(TorchCollectives):
    """Run collectives of torch.distributed; raise an error naming the rank and tensor that differ, instead of hanging.

    With unequal shapes a backend aborts the process, hangs, or mixes up bytes. Ranks gather an 8-byte hash of
    operation, shapes and dtypes first, and the details where hashes differ.

    If ``thorough``, broadcasts are checked too. Their source does not wait for the other ranks; a check makes it wait.
    """

    def __init__(self, device: torch.device, *, device_ids: list[int] | None = None, thorough: bool = False) -> None:
        super().__init__(device, device_ids=device_ids)
        self._thorough = thorough

    @override
    def verify(
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        if not (waits or self._thorough):
            return
        shapes_and_dtypes = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        hashes = self.all_gather(_hash(operation, shapes_and_dtypes, shapes)).tolist()
        if hashes.count(hashes[0]) == len(hashes):
            return
        specs = [_spec(shape, dtype, shapes=shapes) for shape, dtype in shapes_and_dtypes]
        calls = self.all_gather_object((operation, paths_of_tensors(data), specs))
        raise CollectiveMismatchError(_difference(calls))


@functools.lru_cache(maxsize=512)  # a training loop sends the same shapes in every step
def _hash(operation: str, shapes_and_dtypes: tuple[tuple[torch.Size, torch.dtype], ...], shapes: bool) -> Tensor:
    specs = [_spec(shape, dtype, shapes=shapes) for shape, dtype in shapes_and_dtypes]
    digest = hashlib.blake2b(repr((operation, specs)).encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), device="cpu")


def _spec(shape: torch.Size, dtype: torch.dtype, *, shapes: bool) -> TensorSpec:
    return tuple(shape) if shapes else (_ANY_SIZE,) * len(shape), str(dtype).removeprefix("torch.")


def _difference(calls: list[tuple[str, list[str], list[TensorSpec]]]) -> str:
    """Describe how the first rank that differs from rank 0 differs, and suggest a change."""
    operation, paths, specs = calls[0]
    for rank, (other_operation, other_paths, other_specs) in enumerate(calls):
        if other_operation != operation:
            return (
                f"rank 0 called {operation} while rank {rank} called {other_operation}. All ranks have to call the "
                "same operations in the same order: look for one that only some ranks reach, for example inside an "
                "`if accelerator.is_main_process:`."
            )
        for path, spec, other_path, other in zip(paths, specs, other_paths, other_specs, strict=False):
            if spec != other:
                where = "" if not path else f" in {path}" if path == other_path else f" in {path} and {other_path}"
                return (
                    f"{operation} was given {_described(spec)} on rank 0 and {_described(other)} on rank {rank}"
                    f"{where}. {_advice(operation, spec, other)}"
                )
        if len(specs) != len(other_specs):
            longer, its_paths = (rank, other_paths) if len(other_specs) > len(specs) else (0, paths)
            extra = its_paths[min(len(specs), len(other_specs))]
            return (
                f"{operation} was given {len(specs)} tensors on rank 0 and {len(other_specs)} on rank {rank}; only "
                f"rank {longer} has {extra}. Give it the same structure on all ranks."
            )
    raise AssertionError("hashes differ, but operations, paths and specs do not")


def _described(spec: TensorSpec) -> str:
    shape, dtype = spec
    size = f"of {len(shape)} dimensions" if _ANY_SIZE in shape else f"of shape {shape}"
    return f"a tensor {size} and dtype {dtype}"


def _advice(operation: str, spec: TensorSpec, other: TensorSpec) -> str:
    shape, dtype = spec
    other_shape, other_dtype = other
    if dtype != other_dtype:
        return f"Convert it to one dtype on all ranks, for example with .to(torch.{dtype})."
    if len(shape) != len(other_shape):
        return "Give it the same number of dimensions on all ranks."
    dims = [dim for dim, (size, more) in enumerate(zip(shape, other_shape, strict=True)) if size != more]
    if operation == "gather" and len(dims) == 1:
        return (
            f"Make them equal first: tensor = accelerator.pad_across_processes(tensor, dim={dims[0]}); or gather a "
            "list of them with gather_for_metrics(list, use_gather_object=True)."
        )
    return "Give it tensors of the same shape on all ranks."
