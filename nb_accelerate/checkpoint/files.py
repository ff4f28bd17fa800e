"""One file of a checkpoint: tensors as safetensors, other things as torch saves them."""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nb_accelerate.config.checks import check_whole
from nb_accelerate.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?|)([Bb])", re.IGNORECASE)


def write(obj: Any, file: Any, *, safe_serialization: bool) -> None:
    """Write an object.

    Args:
        obj: what to save; with ``safe_serialization`` a dict of tensors.
        file: its path, or else something that is open for writing.
        safe_serialization: write safetensors, with tensors that share memory written once.
    """
    if safe_serialization:
        from safetensors.torch import save_file

        save_file(clean_state_dict_for_safetensors(obj), file, metadata={"format": "pt"})
    else:
        torch.save(obj, file)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object that `write` or `torch.save` wrote, and refuse files that would run code.

    Args:
        f: the file.
        map_location: where tensors go.
        **kwargs: those of `torch.load`; ``weights_only=False`` is for files you wrote yourself.
    """
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(_NUMPY):
        return torch.load(f, map_location=map_location, **kwargs)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of one file, by name.

    Args:
        checkpoint_file: safetensors, or what `torch.save` wrote.
        device_map: devices by the names of modules; ``""`` stands for all others, which else stay on the CPU.

    Raises:
        CheckpointError: the file is no safetensors file, was cut off, or holds tensors of another framework.
    """
    if not str(checkpoint_file).endswith(".safetensors"):
        tensors: dict[str, Tensor] = load(checkpoint_file, map_location="cpu")
        return {name: tensor.to(device_of(name, device_map)) for name, tensor in tensors.items()}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint_file, framework="pt") as file:
            kind = (file.metadata() or {}).get("format", "pt")
            if kind != "pt":
                raise CheckpointError(f"{checkpoint_file} was saved by {kind}, and not by PyTorch.")
            # To its device one by one: a large file is never in memory twice.
            return {name: file.get_tensor(name).to(device_of(name, device_map)) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint_file} cannot be read, it may have been cut off: {error}") from error


def device_of(name: str, device_map: Mapping[str, int | str | torch.device] | None) -> int | str | torch.device:
    """Return the device of a tensor: that of the innermost module around it that the map names; else the CPU."""
    if not device_map:
        return "cpu"
    part = name
    while part and part not in device_map:
        part = part.rpartition(".")[0]
    return device_map.get(part, "cpu")


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


def _numpy_globals() -> list[Any]:
    """What the state of NumPy's random numbers is made of: an array of numbers, which runs no code."""
    reconstruct = np.zeros(1).__reduce__()[0]
    # Under its names of NumPy 1 and 2: a file may come from either.
    names = [(reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    return [*names, codecs.encode, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


_NUMPY = _numpy_globals()
