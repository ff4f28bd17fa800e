"""Weights of a checkpoint, each to its place: a view of the mapped file, memory, a GPU, or a folder on the disk.

::

    what the files say of each weight --> a plan, checked as a whole --> weights, in the order of the files
    (shape and dtype)                     (device, dtype, way)               VIEW   of the file; nothing is read
                                                                             READ   to its device, in its dtype
                                                                             COPY   into memory that others share
                                                                             WRITE  to the offload folder, and a view
                                                                                    of what was written
"""

from __future__ import annotations

import contextlib
import enum
import os
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.bigmodel.mapped import WeightFiles
from nb_accelerate.training.bigmodel.offloaded import check_space
from nb_accelerate.training.bigmodel.sizes import as_dtype
from nb_accelerate.training.bigmodel.tensors import owner_of, set_module_tensor_to_device
from nb_accelerate.training.bigmodel.ties import device_of
from nb_accelerate.training.checkpoint.files import id_tensor_storage, load_state_dict, weights_of, write_safetensors
from nb_accelerate.training.process.progress import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from tqdm.std import tqdm

    Device = int | str | torch.device
    DeviceMap = Mapping[str, Device]
    Told = Callable[[int], object]

_LONG = 1 << 30  # bytes whose loading is shown by a bar: they take a second or more

_AHEAD = 64 << 20  # bytes that are brought from the disk at once, while those before them go to their devices


class Way(enum.Enum):
    """How a weight gets to its place."""

    VIEW = enum.auto()
    READ = enum.auto()
    COPY = enum.auto()
    WRITE = enum.auto()


@dataclass(frozen=True)
class Step:
    """What is to be done with one weight."""

    device: Device
    dtype: torch.dtype  # that it is to have
    nbytes: int  # in that dtype
    way: Way


class Checkpoint:
    """The files of one checkpoint. Those of safetensors are mapped; others are read one by one."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.mapped = WeightFiles(file for file in files if file.suffix == ".safetensors")
        self._others = [file for file in files if file.suffix != ".safetensors"]
        self.contents: dict[Path, dict[str, Any]] = {file: {} for file in files}
        """What is in each file, by name: tensors on ``meta``, or what is no tensor."""
        for name in self.mapped:
            entry = self.mapped.entry(name)
            self.contents[entry.file][name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for file in self._others:
            # Files of the old format cannot be mapped.
            for name, value in weights_of(file, mmap=zipfile.is_zipfile(file)).items():
                self.contents[file][name] = value.to("meta") if isinstance(value, torch.Tensor) else value

    def parts(self) -> Iterator[Mapping[str, Any]]:
        """Yield weights by name: of all files that are mapped, then of each other file."""
        yield self.mapped
        for file in self._others:
            yield load_state_dict(file)


def plan(
    checkpoint: Checkpoint,
    state_dict: Mapping[str, Any],
    device_map: DeviceMap,
    dtype: str | torch.dtype | None,
    float32: Sequence[str],
) -> dict[str, Step]:
    """Decide how each weight gets to its place.

    Args:
        state_dict: of the model, with its parameters themselves.
        dtype: which weights are to have; by default the model's.
        float32: parts of names of weights that stay float32 where ``dtype`` is float16.
    """
    state = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    # Of two parameters in one memory, a file has one only.
    memory = Counter(id_tensor_storage(tensor) for tensor in {id(tensor): tensor for tensor in state.values()}.values())
    steps = {}
    for content in checkpoint.contents.values():
        for name in state.keys() & content.keys():
            like, now, device = content[name], state[name], device_of(name, device_map)
            wanted = _dtype_of(name, like, now, dtype, float32)
            on_host = str(device) in ("cpu", "disk")
            if on_host and memory[id_tensor_storage(now)] > 1:
                way = Way.COPY
            elif on_host and wanted == like.dtype and name in checkpoint.mapped:
                way = Way.VIEW
            else:
                way = Way.WRITE if device == "disk" and like.numel() else Way.READ
            steps[name] = Step(device, wanted, like.numel() * wanted.itemsize, way)
    return steps


def _dtype_of(
    name: str, like: Tensor, now: Tensor, dtype: str | torch.dtype | None, float32: Sequence[str]
) -> torch.dtype:
    if now.is_floating_point() != like.is_floating_point():
        return like.dtype  # it is quantised, or will be
    if dtype is None or not like.is_floating_point():
        return now.dtype
    wanted = as_dtype(dtype)
    if wanted is torch.float16 and any(part in name for part in float32):
        return torch.float32
    return wanted


def check_folder(steps: Iterable[Step], folder: str | os.PathLike[str] | None) -> None:
    """Check that there is room for what is to be written, before anything is."""
    needed = sum(step.nbytes for step in steps if step.way is Way.WRITE)
    if not needed:
        return
    if folder is None:
        raise ConfigError(
            f"Weights of {needed / 1e9:.3g} GB are to be on the disk, and the checkpoint has them in another dtype, or "
            "not in safetensors files. Give offload_folder: they are written there once. Or give the dtype of a "
            "checkpoint in safetensors files, which are used where they are."
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    check_space(Path(folder), needed)


def place(
    checkpoint: Checkpoint, model: nn.Module, steps: Mapping[str, Step], folder: str | os.PathLike[str] | None
) -> None:
    """Bring all weights to their places, with a bar if that takes long.

    Args:
        folder: for weights on disk that are not used where they are.
    """
    with _bar(sum(step.nbytes for step in steps.values() if step.way is not Way.VIEW)) as told:
        for number, part in enumerate(checkpoint.parts()):
            names = [name for name in part if name in steps]
            for name in _in_memory(part, [name for name in names if steps[name].way is not Way.WRITE], steps):
                _put(model, name, part[name], steps[name], scales=part.get(scales_of(name)))
                told(steps[name].nbytes if steps[name].way is not Way.VIEW else 0)
            written = {name: steps[name] for name in names if steps[name].way is Way.WRITE}
            if written and folder is not None:
                files = _written(part, written, Path(folder) / f"weights-{number}.safetensors", told)
                for name, step in written.items():
                    _put(model, name, files[name], step)
            # What the ``get_extra_state`` of modules has returned, unless that is a tensor.
            for name, module in model.named_modules():
                key = f"{name}._extra_state" if name else "_extra_state"
                if key in part and not isinstance(part[key], torch.Tensor):
                    module.set_extra_state(part[key])


def convert_others(
    model: nn.Module, steps: Mapping[str, Step], dtype: str | torch.dtype | None, float32: Sequence[str]
) -> None:
    """Give weights that the checkpoint lacks the dtype that they would have from there."""
    for name, now in model.state_dict(keep_vars=True).items():
        if name not in steps and isinstance(now, torch.Tensor) and not now.is_meta:
            now.data = now.data.to(_dtype_of(name, now, now, dtype, float32))


def scales_of(name: str) -> str:
    """Return the name of the scales that bitsandbytes keeps beside a weight in 8 bits."""
    return f"{name.removesuffix('weight')}SCB"


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Told]:
    """Yield what is told the bytes that were loaded."""
    if total < _LONG:
        yield lambda _: None
        return
    bar: tqdm[Any] = progress(label="loading weights", total=total, leave=False)
    with bar:
        bar.unit, bar.unit_scale = "B", True
        bar.refresh()
        yield bar.update


def _in_memory(part: Mapping[str, Any], names: Sequence[str], steps: Mapping[str, Step]) -> Iterator[str]:
    """Yield names of weights: views, then others, when they are in memory. The next are read while some are used."""
    yield from (name for name in names if steps[name].way is Way.VIEW)
    read = [name for name in names if steps[name].way is not Way.VIEW]
    if not read or not isinstance(part, WeightFiles):
        yield from read
        return
    groups: list[list[str]] = [[]]
    for name in sorted(read, key=lambda name: (part.entry(name).file, part.entry(name).start)):
        if groups[-1] and part.nbytes([*groups[-1], name]) > _AHEAD:
            groups.append([])
        groups[-1].append(name)
    with ThreadPoolExecutor(1, "nb-weights") as pool:
        ahead = pool.submit(part.fetch, groups[0])
        for group, following in zip(groups, [*groups[1:], []], strict=True):
            ahead.result()
            ahead = pool.submit(part.fetch, following)
            yield from group


def _written(part: Mapping[str, Any], steps: Mapping[str, Step], file: Path, told: Told) -> WeightFiles:
    """Write weights to a file, one by one, and map it."""

    def converted(name: str) -> Tensor:
        told(steps[name].nbytes)
        value: Tensor = part[name]
        return value.to(steps[name].dtype)

    likes = {name: torch.empty(part[name].shape, dtype=step.dtype, device="meta") for name, step in steps.items()}
    new = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with new.open("wb") as opened:
            write_safetensors(likes, opened, converted)
        new.replace(file)  # not in place: another model may use the file that was there
    except OSError as error:
        raise CheckpointError(f"{file} could not be written: {error}") from error
    finally:
        new.unlink(missing_ok=True)
    return WeightFiles([file])


def _put(model: nn.Module, name: str, value: Tensor, step: Step, *, scales: Tensor | None = None) -> None:
    owner, last = owner_of(model, name)
    now, device = getattr(owner, last), "cpu" if step.device == "disk" else step.device
    value = value.to(step.dtype)
    if now.dim() == 0:  # old files have such numbers in a list
        value = value.view(())
    if step.way is Way.COPY:
        with torch.no_grad():
            now.copy_(value)
    elif type(now) in (torch.Tensor, torch.nn.Parameter) and not now.is_meta:
        now.data = value.to(device)  # the same parameter: optimizers hold it
    else:
        set_module_tensor_to_device(
            model, name, device, value, dtype=step.dtype, fp16_statistics=scales, clear_cache=False
        )
