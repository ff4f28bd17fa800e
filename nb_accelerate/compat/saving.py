"""Save and load one object."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.compat.here import process_here
from nb_accelerate.config.checks import check_whole
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)([Bb])", re.IGNORECASE)


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on the main process; on others, do nothing.

    Args:
        obj: what to save; with ``safe_serialization`` a dict of tensors.
        f: the file.
        save_on_each_node: on the first process of each machine instead, for disks that machines do not share.
        safe_serialization: write safetensors, with tensors that share memory written once.
    """
    topology = process_here().topology
    if not (topology.is_local_main if save_on_each_node else topology.is_main):
        return
    if safe_serialization:
        from safetensors.torch import save_file

        save_file(clean_state_dict_for_safetensors(obj), f, metadata={"format": "pt"})
    else:
        torch.save(obj, f)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that `save` or `torch.save` wrote, and refuse files that would run code.

    Args:
        f: the file.
        map_location: where tensors go.
        **kwargs: those of `torch.load`; ``weights_only=False`` is for files you wrote yourself.
    """
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return what two tensors have in common when they share memory: device, address and size of their storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict that safetensors can write: contiguous, and with one name for tensors that are tied.

    Of several names for the same memory the first is kept; loading ties the others again.
    """
    kept: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        tied = (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and tied in seen:
            continue
        seen.add(tied)
        own = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tied[2]
        # A slice or transpose of something that is written as well would share its memory, which the format refuses.
        kept[name] = tensor.detach() if own else tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5,000,000,000 and ``"5GiB"`` 5 * 2**30; ``"5Gb"`` counts bits.

    Raises:
        ConfigError: it is not a size.
    """
    if isinstance(size, int):
        return check_whole("size", size, at_least=0)
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ConfigError(f"size={size!r} is not a size. Write bytes, or text such as '5GB' or '200MiB'.")
    size_in_units = float(match[1]) * _PREFIXES[match[2].upper()]
    return int(size_in_units / 8 if match[3] == "b" else size_in_units)
