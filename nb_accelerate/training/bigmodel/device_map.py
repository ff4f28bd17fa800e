"""Device maps: which module of a model is on which device. Pure arithmetic on sizes; nothing is moved.

::

    modules in their order --> the device that is filled now, if they fit
                 ^             else their submodules, if they may be split ---+
                 |             else the next device: GPUs, cpu, disk          |
                 +------------------------------------------------------------+

What is on the cpu or the disk visits the first GPU to be computed, block by block, and what is on the disk goes through
the memory of the host. Room for the largest visitor is kept there, and only if there is a visitor.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice
from nb_accelerate.base.table import Table
from nb_accelerate.base.words import size
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.device_memory import (
    Limits,
    get_balanced_memory,
    get_max_memory,
    limits_for,
    named_classes,
    read_limits,
)
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes, get_max_layer_size
from nb_accelerate.training.bigmodel.tensors import tensor_names
from nb_accelerate.training.bigmodel.ties import (
    check_tied_parameters_in_config,
    device_of,
    find_shared_tensors,
    find_tied_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from nb_accelerate.training.bigmodel.sizes import CustomDtype


logger = logging.getLogger("nb_accelerate")

_OFFLOADED = ("cpu", "disk")

_WAYS = ("auto", "balanced", "balanced_low_0", "sequential")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype | str] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device for each part of a model: GPUs are filled one after the other, then the cpu, then the disk.

    Tied weights come to one device. Parameters and buffers beside submodules are mapped too.

    Examples:
        ```python
        infer_auto_device_map(model, {0: "10GiB", "cpu": "30GiB"}, no_split_module_classes=["LlamaDecoderLayer"])
        ```

    Args:
        model: on any device, also on ``meta``.
        max_memory: as for `get_max_memory`.
        no_split_module_classes: names of module classes that stay whole, because of a residual connection, say.
        dtype: count weights as if they had this dtype, where that makes them smaller.
        special_dtypes: count these tensors, by name, as if they had these dtypes.
        verbose: print where each part goes.
        clean_result: name a module that is on one device as a whole, in place of its parts.
        offload_buffers: buffers of offloaded modules are offloaded as well; else the first GPU keeps room for them.
        fallback_allocation: where the next part does not fit, put later parts that do. accelerate puts one, to a device
            that is still empty.

    Returns:
        Devices by names of modules and tensors: numbers of GPUs, ``"cpu"``, ``"disk"``.

    Raises:
        ConfigError: as `get_max_memory`, or torch has no such dtype.
    """
    limits = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    buffers = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True)
    whole, ties = named_classes(no_split_module_classes), find_shared_tensors(model)
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        logger.warning("The config ties weights of this model, but they are not tied yet. Call model.tie_weights().")
    gpus = [device for device in limits if device not in _OFFLOADED]
    rooms = {gpus[0]: 0.0} if gpus else {}
    if "cpu" in limits:
        rooms["cpu"] = 0.0
    while True:
        placing = _Placing(model, limits, rooms, sizes, whole, ties)
        placing.place_all(fallback=fallback_allocation)
        visits = {
            device: placing.largest_visitor(device, buffers, keeps_buffers=not offload_buffers) for device in rooms
        }
        # A room that is too small grows to the size of a visitor. There are finitely many, so this ends.
        missing = {
            device: visit
            for device, visit in visits.items()
            if visit > rooms[device] and placing.used[device] + visit > limits[device]
        }
        if not missing:
            break
        rooms |= missing
    if verbose:
        for name, device in placing.devices.items():
            print(f"{name}: {device} ({sizes[name]:,.0f} bytes)")  # noqa: T201 - it was asked for
    for device, visit in visits.items():
        if visit > limits[device]:
            logger.warning(
                "The largest offloaded block has %d bytes and visits device %s, where max_memory allows %d.",
                visit,
                device,
                limits[device],
            )
    return clean_device_map(placing.devices) if clean_result else placing.devices


def planned_map(
    model: nn.Module,
    limits: Mapping[int | str, int],
    way: str = "auto",
    *,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_buffers: bool = False,
    **counted: Any,
) -> dict[str, int | str]:
    """Return the map of ``device_map="auto"`` and its like, within given bytes, without a look at this machine."""
    counted["no_split_module_classes"] = no_split_module_classes or getattr(model, "_no_split_modules", None)
    way = check_choice("device_map", way, _WAYS)
    if way != "sequential":
        limits = get_balanced_memory(model, Limits(limits), low_zero=way == "balanced_low_0", **counted)
    return infer_auto_device_map(model, Limits(limits), offload_buffers=offload_buffers, **counted)


class _Placing:
    """One try to place a model, with given rooms for visitors."""

    def __init__(
        self,
        model: nn.Module,
        limits: Mapping[int | str, int],
        rooms: Mapping[int | str, float],
        sizes: Mapping[str, float],
        whole: Sequence[str],
        ties: Sequence[Sequence[str]],
    ) -> None:
        self.devices: dict[str, int | str] = {}
        self.used: dict[int | str, float] = dict.fromkeys([*limits, "disk"], 0.0)
        self._limits, self._rooms, self._sizes, self._whole, self._ties = limits, rooms, sizes, whole, ties
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._order = [*(device for device in limits if device != "disk"), "disk"]
        self._waiting = _parts_of("", model)

    def place_all(self, *, fallback: bool) -> None:
        while self._waiting:
            name = self._waiting.pop(0)
            beside = self._tied_to(name)
            left = self._left()
            if self._size(name, *beside) <= left:
                self._put(name, beside)
            elif beside and self._size(name) <= left:
                # It fits, but not with the parts that its ties are in. These ties are kept by splitting the parts.
                if self._split_first(beside):
                    self._waiting.insert(0, name)
                else:
                    self._next_device(name, fallback=fallback)
            elif not self._split(name, at=0):
                self._next_device(name, fallback=fallback)

    def largest_visitor(self, device: int | str, buffers: Mapping[str, float], *, keeps_buffers: bool) -> float:
        """Return the bytes that the largest block takes that visits a device, with buffers that stay there."""
        sources = ("disk",) if device == "cpu" else _OFFLOADED
        away = [name for name, place in self.devices.items() if place in sources]
        parts = [(name, self._modules[name]) for name in away if name in self._modules]
        largest, _ = get_max_layer_size(parts, self._sizes, self._whole)
        tensors = (self._sizes[name] for name in away if name not in self._modules)
        staying = sum(buffers.get(name, 0) for name in away) if keeps_buffers and device != "cpu" else 0
        return max([largest, *tensors]) + staying

    def _left(self) -> float:
        device = self._order[0]
        if device == "disk":
            return float("inf")
        return self._limits[device] - self._rooms.get(device, 0) - self.used[device]

    def _size(self, *names: str) -> float:
        """Return the bytes of some parts. Tied weights are in the size of one of them only."""
        return sum(self._sizes.get(name, 0) for name in names)

    def _tied_to(self, name: str) -> list[str]:
        """Return the waiting parts that share a tensor with this part, or with another one of them."""
        together = [name]
        for part in together:  # grows meanwhile
            groups = [group for group in self._ties if any(_is_in(tied, part) for tied in group)]
            together += [
                other
                for other in self._waiting
                if other not in together and any(_is_in(tied, other) for group in groups for tied in group)
            ]
        return together[1:]

    def _put(self, name: str, beside: Sequence[str]) -> None:
        device = self._order[0]
        self.used[device] += self._size(name, *beside)
        for part in (name, *beside):
            self.devices[part] = device
        self._waiting = [part for part in self._waiting if part not in beside]

    def _split(self, name: str, at: int) -> bool:
        """Insert the submodules and tensors of a part at index ``at`` of the waiting ones. False if it stays whole."""
        module = self._modules.get(name)
        if module is None or type(module).__name__ in self._whole or not any(module.children()):
            return False
        self._waiting[at:at] = _parts_of(name, module)
        return True

    def _split_first(self, parts: Iterable[str]) -> bool:
        """Split the first of some waiting parts that can be. Returns whether there was one."""
        for part in parts:
            at = self._waiting.index(part)
            del self._waiting[at]
            if self._split(part, at):
                return True
            self._waiting.insert(at, part)
        return False

    def _next_device(self, name: str, *, fallback: bool) -> None:
        self._waiting.insert(0, name)
        if not (fallback and self._put_another()):
            self._order.pop(0)

    def _put_another(self) -> bool:
        """Put the first part that fits, in the order of the model. Returns whether there is one."""
        before = list(self._waiting)
        at = 0
        while at < len(self._waiting):
            name = self._waiting.pop(at)
            beside = self._tied_to(name)
            if self._size(name, *beside) <= self._left():
                self._put(name, beside)
                return True
            if not self._split(name, at):
                self._waiting.insert(at, name)
                at += 1
        self._waiting = before
        return False


def _parts_of(name: str, module: nn.Module) -> list[str]:
    """Return the names of a module's own tensors and of its submodules, also those of one that has several."""
    prefix = f"{name}." if name else ""
    parts = (
        *(part for part, _ in module.named_parameters(recurse=False, remove_duplicate=False)),
        *(part for part, child in module._modules.items() if child is not None),  # noqa: SLF001
        *(part for part, _ in module.named_buffers(recurse=False, remove_duplicate=False)),
    )
    return [f"{prefix}{part}" for part in parts]


def _is_in(name: str, part: str) -> bool:
    return not part or name == part or name.startswith(f"{part}.")


def clean_device_map(device_map: dict[str, int | str], module_name: str = "") -> dict[str, int | str]:
    """Name modules that are on one device as a whole, in place of their parts. Changes the map, and returns it.

    Args:
        device_map: devices by name.
        module_name: look below this module only; "" for the whole model.
    """
    inside = [name for name in device_map if _is_in(name, module_name)]
    if len(inside) > 1 and len({device_map[name] for name in inside}) == 1:
        device = device_map[inside[0]]
        for name in inside:
            del device_map[name]
        device_map[module_name] = device
        return device_map
    depth = module_name.count(".") + 2 if module_name else 1
    for child in dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside):
        if child != module_name:
            clean_device_map(device_map, child)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, int | str | torch.device]) -> None:
    """Check that a device map has a device for each tensor of a model's state dict.

    Args:
        model: the model.
        device_map: devices by names of modules and tensors; ``""`` is the whole model.

    Raises:
        ConfigError: some tensors have none. All are named.
    """
    known = {*tensor_names(model), *(name for name, _ in model.named_modules(remove_duplicate=False))}
    wrong = [name for name in device_map if name not in known]
    if wrong:
        warnings.warn(f"device_map names what this model does not have: {', '.join(wrong)}", UserWarning, stacklevel=2)
    missing = [name for name in model.state_dict() if not any(_is_in(name, part) for part in device_map)]
    if missing:
        raise ConfigError(
            f"device_map has no device for {', '.join(missing)}. Add one for a module around each, or for ''."
        )


def show_map(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device] | str | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
) -> Table:
    """Return how many bytes the layers of a model have, and on which device: text, and a table in a cell.

    Args:
        model: placed, on one device, or without weights yet (on ``meta``).
        device_map: devices by names of modules, or a word such as ``"auto"``. None for the devices on which the model
            is; for one without weights it is ``"auto"``.
        max_memory: bytes, or text such as ``"10GiB"``, by device, for a map that is inferred. None for what is free.

    Raises:
        ConfigError: the map has no device for a tensor, or is another word; a size cannot be read.
    """
    placed = getattr(model, "hf_device_map", None)
    if device_map is None and (max_memory is not None or all(weight.is_meta for weight in model.parameters())):
        device_map = placed or "auto"
    if isinstance(device_map, str):
        limits = limits_for(None) if max_memory is None else read_limits(max_memory)
        device_map = planned_map(model, limits, device_map)
    elif device_map is not None:
        check_device_map(model, {name: str(device) for name, device in device_map.items()})
    devices = placed or {} if device_map is None else device_map
    parts: Counter[tuple[str, str]] = Counter()
    totals: Counter[str] = Counter()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a DTensor what this rank has
        entry = device_of(name, devices, default=local.device)
        device = f"GPU {entry}" if isinstance(entry, int) else str(entry)
        # The layer of a tensor: ``layers.3`` of ``layers.3.up.weight``, ``head`` of ``head.weight``.
        words = name.split(".")
        numbers = [index for index, word in enumerate(words) if word.isdecimal()]
        parts[".".join(words[: numbers[0] + 1] if numbers else words[:-1] or words), device] += local.nbytes
        totals[device] += local.nbytes
    rows = [*_folded(parts), *(("in all", size(taken), device) for device, taken in totals.items())]
    return Table(("layer", "bytes", "device"), rows, right=("bytes",))


def _folded(parts: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, str, str]]:
    def run_of(numbered: tuple[int, tuple[tuple[str, str], int]]) -> tuple[object, ...]:
        index, ((layer, device), taken) = numbered
        parent, _, number = layer.rpartition(".")
        return (parent, int(number) - index, device, taken) if number.isdecimal() else (index,)

    for _, grouped in itertools.groupby(enumerate(parts.items()), run_of):
        ((first, device), taken), *others = (part for _, part in grouped)
        if others:
            number = others[-1][0][0].rpartition(".")[2]
            yield f"{first}-{number}", f"{len(others) + 1} x {size(taken)}", device
        else:
            yield first, size(taken), device
