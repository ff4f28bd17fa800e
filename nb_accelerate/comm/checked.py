"""Collectives that compare what ranks hand in before they run.

A backend that is handed unequal shapes aborts the process, waits for ever, or mixes up bytes. So ranks first gather a
fingerprint of what they are about to send: 8 bytes. Only where fingerprints differ do they tell each other more, and
every rank raises the same error.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.comm.torch_distributed import TorchCollectives
from nb_accelerate.errors import CollectiveMismatchError
from nb_accelerate.pytree import paths_of_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Leaf = tuple[tuple[int, ...], str]  # shape and dtype
_ANY = -1  # in place of a size that does not matter


class CheckedCollectives(TorchCollectives):
    """Collectives of torch.distributed that say which rank and which tensor do not fit, before anything hangs.

    Args:
        device: the device of this rank.
        device_ids: what barriers are told.
        thorough: check broadcasts too, in which rank 0 would not wait for the others.
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
        looks = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        fingerprints = self.all_gather(_fingerprint(operation, looks, shapes)).tolist()
        if fingerprints.count(fingerprints[0]) == len(fingerprints):
            return
        leaves = [_leaf(shape, dtype, shapes=shapes) for shape, dtype in looks]
        stories = self.all_gather_object((operation, paths_of_tensors(data), leaves))
        raise CollectiveMismatchError(_difference(stories))


@functools.lru_cache(maxsize=512)  # loops send the same again and again
def _fingerprint(operation: str, looks: tuple[tuple[torch.Size, torch.dtype], ...], shapes: bool) -> Tensor:
    leaves = [_leaf(shape, dtype, shapes=shapes) for shape, dtype in looks]
    digest = hashlib.blake2b(repr((operation, leaves)).encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True))


def _leaf(shape: torch.Size, dtype: torch.dtype, *, shapes: bool) -> Leaf:
    return tuple(shape) if shapes else (_ANY,) * len(shape), str(dtype).removeprefix("torch.")


def _difference(stories: list[tuple[str, list[str], list[Leaf]]]) -> str:
    """Say where the first rank that differs from rank 0 differs, and what to write."""
    operation, paths, leaves = stories[0]
    for rank, (other_operation, other_paths, other_leaves) in enumerate(stories):
        if other_operation != operation:
            return (
                f"rank 0 called {operation} while rank {rank} called {other_operation}. All ranks have to call the "
                "same operations in the same order: look for one that only some ranks come to, inside an "
                "`if accelerator.is_main_process:`, say."
            )
        for path, leaf, other_path, other in zip(paths, leaves, other_paths, other_leaves, strict=False):
            if leaf != other:
                where = "" if not path else f" in {path}" if path == other_path else f" in {path} and {other_path}"
                return (
                    f"{operation} was given {_described(leaf)} on rank 0 and {_described(other)} on rank {rank}"
                    f"{where}. {_advice(operation, leaf, other)}"
                )
        if len(leaves) != len(other_leaves):
            more = (rank, other_paths) if len(other_leaves) > len(leaves) else (0, paths)
            extra = more[1][min(len(leaves), len(other_leaves))]
            return (
                f"{operation} was given {len(leaves)} tensors on rank 0 and {len(other_leaves)} on rank {rank}; only "
                f"rank {more[0]} has {extra}. Give it the same structure on all ranks."
            )
    raise AssertionError("fingerprints differed, but nothing else did")


def _described(leaf: Leaf) -> str:
    shape, dtype = leaf
    size = f"of {len(shape)} dimensions" if _ANY in shape else f"of shape {shape}"
    return f"a tensor {size} and dtype {dtype}"


def _advice(operation: str, one: Leaf, other: Leaf) -> str:
    if one[1] != other[1]:
        return f"Convert it to one dtype on all ranks, with .to(torch.{one[1]}), say."
    if len(one[0]) != len(other[0]):
        return "Give it as many dimensions on all ranks."
    dims = [dim for dim, (size, more) in enumerate(zip(one[0], other[0], strict=True)) if size != more]
    if operation == "gather" and len(dims) == 1:
        return (
            f"Make them equal first: tensor = accelerator.pad_across_processes(tensor, dim={dims[0]}); or gather a "
            "list of them with gather_for_metrics(list, use_gather_object=True)."
        )
    return "Give it tensors of the same shape on all ranks."
