"""One file of a checkpoint: tensors as safetensors, other things as torch saves them."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import struct
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.bigmodel.mapped import check_files
from nb_accelerate.training.bigmodel.ties import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


_SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip

# What torch.load raises over bytes that are not what torch.save writes, besides UnpicklingError.
_UNREADABLE = (
    EOFError, OSError, RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError,
    OverflowError, MemoryError, struct.error,
)  # fmt: skip


def write(obj: Any, file: Any, *, safe_serialization: bool, has_checksums: bool = False) -> None:
    """Write an object to a path, or to what is open for writing."""
    # Of a file that has checksums, torch's own, which take as long as all the rest, are left out.
    from safetensors import SafetensorError

    check_files(obj.values() if isinstance(obj, Mapping) else ())
    try:
        if isinstance(file, (str, os.PathLike)):
            # Opened here: torch would tell nothing of what the disk says.
            with Path(file).open("wb") as opened, _without_checksums_of_torch(has_checksums):
                _write_to(obj, opened, safe_serialization=safe_serialization)
        else:
            _write_to(obj, file, safe_serialization=safe_serialization)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch raises an error of its own, caused by the disk's.
        cause: BaseException | None = error
        while isinstance(cause, RuntimeError):
            cause = cause.__context__
        if cause is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} could not be written: {cause}") from error


def _write_to(obj: Any, file: Any, *, safe_serialization: bool) -> None:
    if isinstance(obj, bytes):
        file.write(obj)
    elif safe_serialization:
        tensors = clean_state_dict_for_safetensors(obj)
        write_safetensors(tensors, file, tensors.__getitem__)
    else:
        torch.save(obj, file)


def write_safetensors(tensors: Mapping[str, Tensor], file: Any, get: Callable[[str], Tensor]) -> None:
    """Write tensors one by one, straight from where they are: the library makes a copy of all of them first."""
    unknown = {tensor.dtype for tensor in tensors.values()} - _SAFETENSORS_DTYPES.keys()
    if unknown or sys.byteorder != "little":
        from safetensors.torch import save

        file.write(save({name: get(name) for name in tensors}, metadata={"format": "pt"}))
        return
    # The widest numbers first, as the library has it, so that each tensor begins at a multiple of its own width.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        shape = list(tensors[name].shape)
        dtype = _SAFETENSORS_DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(bytes_of(get(name)))


def saved_bytes(obj: Any) -> bytes:
    """Return what `torch.save` writes."""
    with io.BytesIO() as file:
        torch.save(obj, file)
        return file.getvalue()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, without a copy if it is on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    numbers: Any = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)


@contextlib.contextmanager
def _without_checksums_of_torch(unwanted: bool) -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    # Torch has one setting for all threads: while one saves in the background, another may save something of its own.
    is_main = threading.current_thread() is threading.main_thread()
    torch.serialization.set_crc32_options(before and not (unwanted and is_main))
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


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


def load_or_explain(file: str | os.PathLike[str], map_location: Any, *, if_trusted: str, **kwargs: Any) -> Any:
    """Do as `load` does; say which file could not be loaded, why, and how to allow it to run code."""
    try:
        return load(file, map_location=map_location, **kwargs)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing.") from error
    except UnpicklingError as error:
        makes = _needs_pickle(file)
        if makes:
            raise CheckpointError(
                f"{file} holds more than tensors and plain data, and loading it would run its code: it makes "
                f"{', '.join(makes)}. If you know where the file comes from, allow just that: "
                f"torch.serialization.add_safe_globals([{', '.join(makes)}]). If you wrote it yourself, {if_trusted}"
            ) from error
        raise _damaged(file, error) from error
    except _UNREADABLE as error:
        raise _damaged(file, error) from error


def weights_of(file: str | os.PathLike[str], **kwargs: Any) -> Mapping[str, Any]:
    """Return what a file that `torch.save` wrote holds by name. ``kwargs`` are those of `torch.load`."""
    trusted = "load it with torch.load(..., weights_only=False), and save its weights alone."
    tensors: Any = load_or_explain(file, "cpu", if_trusted=trusted, **kwargs)
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(f"{file} does not hold weights by name, but a {type(tensors).__name__}.")
    return tensors


def _needs_pickle(file: str | os.PathLike[str]) -> list[str]:
    """Return the names of what a file would make besides tensors and plain data; none if it was damaged."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                has_checksums = any(entry.CRC for entry in archive.infolist())
                if has_checksums and archive.testzip() is not None:
                    return []
        with torch.serialization.safe_globals(_NUMPY):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (UnpicklingError, zipfile.BadZipFile, *_UNREADABLE):
        return []


def _damaged(file: Any, error: Exception) -> CheckpointError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, UnpicklingError):
        reason = "its content is not what torch.save writes"  # torch's text advises to allow it to run code
    return CheckpointError(f"{file} cannot be read, it may have been cut off or damaged: {reason:.300}")


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of one file, by name.

    Args:
        checkpoint_file: safetensors, or what `torch.save` wrote.
        device_map: devices by the names of modules; ``""`` stands for all others, which else stay on the CPU.

    Raises:
        CheckpointError: the file was cut off, would run code, or holds tensors of another framework.
    """
    devices = device_map or {}
    if not str(checkpoint_file).endswith(".safetensors"):
        return {
            # What is no tensor belongs to a module with a state of its own kind (get_extra_state).
            name: tensor.to(device_of(name, devices, "cpu")) if isinstance(tensor, torch.Tensor) else tensor
            for name, tensor in weights_of(checkpoint_file).items()
        }
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(checkpoint_file, framework="pt") as file:
            kind = (file.metadata() or {}).get("format", "pt")
            if kind != "pt":
                raise CheckpointError(f"{checkpoint_file} was saved by {kind}, and not by PyTorch.")
            # To its device one by one: a large file is never in memory twice.
            return {
                name: file.get_tensor(name).to(device_of(name, devices, "cpu"))
                for name in file.keys()  # noqa: SIM118
            }
    except (SafetensorError, OSError, ValueError, KeyError, struct.error) as error:
        raise _damaged(checkpoint_file, error) from error


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return what two tensors have in common when they share memory: device, address and size of their storage.

    A sparse tensor, which has several, one that is sharded over ranks, and one on a device without addresses share with
    themselves only.
    """
    if tensor.layout is not torch.strided or hasattr(tensor, "device_mesh") or not tensor.data_ptr():
        return tensor.device, id(tensor), 0
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict that safetensors can write: contiguous, and with one name for tensors that are tied.

    Of several names for the same memory the first is kept; loading ties the others again.

    Raises:
        CheckpointError: something is not a tensor, or one that is sparse.
    """
    kept: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(
                f"{name} is of type {kind}, which safetensors cannot hold. Write safe_serialization=False."
            )
        storage = id_tensor_storage(tensor)
        signs = tensor.is_conj(), tensor.is_neg()  # of views with other numbers at the same address
        tied = (*storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), signs)
        if tensor.numel() and tied in seen:
            continue
        # Views of something that is written as well would share its memory, which the format refuses.
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage[2]
        is_whole = whole and storage not in seen and not any(signs)
        seen |= {tied, storage}
        plain = tensor.detach().resolve_conj().resolve_neg()
        kept[name] = tensor.detach() if is_whole else plain.clone(memory_format=torch.contiguous_format)
    return kept


def _numpy_globals() -> list[Any]:
    """What NumPy's arrays and numbers are made of, which run no code: its random numbers, and metrics of users."""
    makers = {"_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64(1).__reduce__()[0]}
    # Under their names of NumPy 1 and 2: a file may come from either.
    names = [(make, f"numpy.{core}.multiarray.{name}") for name, make in makers.items() for core in ("core", "_core")]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"}  # not objects
    return [*names, *kinds, codecs.encode, np.ndarray, np.dtype]


_NUMPY = _numpy_globals()
