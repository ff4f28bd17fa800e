"""Collectives that compare operation, shapes and dtypes across ranks before they run.

With unequal shapes a backend aborts the process, hangs, or mixes up bytes. Ranks therefore gather an 8-byte hash of
operation, shapes and dtypes first. Where hashes differ they gather the details too, and every rank raises the same
error.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import CollectiveMismatchError
from nb_accelerate.training.comm.torch_distributed import TorchCollectives
from nb_accelerate.training.pytree import paths_of_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TensorSpec = tuple[tuple[int, ...], str]  # shape and name of the dtype

_ANY_SIZE = -1  # in a shape: the size may differ between ranks


class CheckedCollectives(TorchCollectives):
    """Run collectives of torch.distributed; raise an error naming the rank and tensor that differ, instead of hanging.

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
