"""Where the tensors of a model compute, and where they rest: as they are, or as a device map would have it."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from nb_accelerate.training.bigmodel.ties import device_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Device = int | str | torch.device

MEMORY, DISK, FILES, NOWHERE = "cpu memory", "disk", "mapped files", "nowhere yet"
"""Where weights rest that are not on a GPU."""


class Places:
    """Where tensors compute and rest: by a map that is planned, or as they are."""

    def __init__(self, device_map: Mapping[str, Device], *, is_plan: bool) -> None:
        self.device_map, self._is_plan = device_map, is_plan
        gpus = [device for device in device_map.values() if str(device) not in ("cpu", "disk")]
        self._main: Device = gpus[0] if gpus else "cpu"
        self._file_at = _mapped_files()

    def entry(self, name: str) -> Device | None:
        """Return the entry of the map that a tensor belongs to; None without a map."""
        found = device_of(name, self.device_map, default="") if self.device_map else ""
        return None if found == "" else found

    def device(self, name: str, tensor: torch.Tensor) -> str:
        """Return the device that a tensor is computed with on."""
        entry = self.entry(name)
        if entry is None:
            return _name_of(tensor.device)
        return _name_of(self._main if str(entry) in ("cpu", "disk") else entry)

    def kind(self, name: str, tensor: torch.Tensor) -> str:
        """Return where a tensor rests: a device, memory, disk, mapped files."""
        if self._is_plan or has_no_memory(tensor):
            entry = self.entry(name)
            return NOWHERE if entry is None else place_of(entry)
        if tensor.device.type != "cpu":
            return place_of(tensor.device)
        return FILES if self._file_at(tensor.data_ptr()) else MEMORY

    def place(self, name: str, tensor: torch.Tensor) -> str:
        """Return where a tensor rests: as `kind`, but with the name of its file."""
        kind = self.kind(name, tensor)
        return Path(self._file_at(tensor.data_ptr())).name if kind == FILES else kind


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a shape only."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def place_of(device: Device) -> str:
    """Return the resting place that an entry of a device map means."""
    return MEMORY if str(device) == "cpu" else _name_of(device)


def _name_of(device: Device) -> str:
    """Return a device as it is called in the table: a number, and torch's ``type:number``, are a GPU."""
    _, _, index = str(device).rpartition(":")
    return f"GPU {index}" if index.isdecimal() else str(device)


def _mapped_files() -> Callable[[int], str]:
    """Return a function from an address to the file that is mapped there, "" where there is none (Linux only)."""
    maps = Path("/proc/self/maps")
    starts, ends, files = [], [], []
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if maps.exists() else ():
        span, *_, file = line.split(maxsplit=5)
        if file.startswith("/") and not file.startswith(("/dev/", "/memfd:")):  # these are shared memory
            start, end = (int(bound, 16) for bound in span.split("-"))
            starts.append(start)
            ends.append(end)
            files.append(file)

    def file_at(address: int) -> str:
        at = bisect_right(starts, address) - 1
        return files[at] if at >= 0 and address < ends[at] else ""

    return file_at
