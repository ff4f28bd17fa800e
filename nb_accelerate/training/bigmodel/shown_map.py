"""What the parts of a model take, where they compute and where they rest: a table, with a bar for each place.

Runs of equal layers are one row. The object is text in a terminal and HTML in a notebook, and needs nothing of either.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from nb_accelerate.training.bigmodel.device_map import check_device_map, planned_map
from nb_accelerate.training.bigmodel.device_memory import limits_for, read_limits
from nb_accelerate.training.bigmodel.map_picture import Bar, as_html, as_text
from nb_accelerate.training.bigmodel.resting_places import DISK, Places, has_no_memory, place_of
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes
from nb_accelerate.training.bigmodel.ties import find_tied_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch

    from nb_accelerate.training.bigmodel.resting_places import Device
    from nb_accelerate.training.bigmodel.sizes import CustomDtype

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Part:
    """A row: one part of a model, or a run of equal layers.

    Attributes:
        name: of the module or tensor; ``model.layers.0-23`` for a run.
        num: how many there are in the run; 1 for a single part.
        bytes: of each. A tied weight counts where it is first.
        device: where it computes: ``"GPU 0"``, ``"cpu"``.
        place: where it rests: ``"GPU 0"``, ``"cpu memory"``, ``"disk"``, ``"model.safetensors"`` for a mapped file.
        is_layer: it is an element of a ``ModuleList``, or of another container.
    """

    name: str
    num: int
    bytes: float
    device: str
    place: str
    is_layer: bool


@dataclass(frozen=True)
class ShownMap:
    """A model's parts with their bytes and places. Drawn as a table in a notebook, text elsewhere.

    Attributes:
        parts: in the order of the model.
        places: bytes by resting place.
        limits: bytes that the model may take, by resting place, as far as they are known.
        notes: sentences below the table.
        device_map: the map that was given, inferred or found; empty for a model that was not placed.
    """

    parts: tuple[Part, ...]
    places: Mapping[str, float]
    limits: Mapping[str, int]
    notes: tuple[str, ...]
    device_map: Mapping[str, Device]

    def __repr__(self) -> str:
        return as_text(self._rows, self._bars, self.notes)

    def _repr_html_(self) -> str:
        return as_html(self._rows, self._bars, self.notes)

    @property
    def _rows(self) -> list[tuple[str, int, float, str, str]]:
        return [(part.name, part.num, part.bytes, part.device, part.place) for part in self.parts]

    @property
    def _bars(self) -> list[Bar]:
        names = dict.fromkeys((*(name for name in self.limits if name != DISK), *self.places))
        return [Bar(name, self.places.get(name, 0), self.limits.get(name)) for name in names]


def show_map(
    model: nn.Module,
    device_map: Mapping[str, int | str | torch.device] | str | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype | str] | None = None,
    offload_buffers: bool = False,
) -> ShownMap:
    """Return what each part of a model takes, where it computes and where it rests. In a cell it is drawn.

    Without a device map it shows a model as it is. One without weights yet (on ``meta``) is shown as
    ``device_map="auto"`` would place it on this machine.

    Examples:
        ```python
        with init_empty_weights():
            model = AutoModelForCausalLM.from_config(config)
        show_map(model, max_memory={0: "14GiB", 1: "14GiB", "cpu": "28GiB"}, dtype="float16")
        ```

    Args:
        model: placed, on one device, or on ``meta``.
        device_map: show the model as this map would place it: devices by names of modules and tensors, ``"auto"``,
            ``"balanced"`` (the same), ``"balanced_low_0"`` or ``"sequential"``.
        max_memory: bytes, or text such as ``"10GiB"``, by device, for a map that is inferred, and as the ends of bars.
        no_split_module_classes: as for `infer_auto_device_map`; None for ``model._no_split_modules``.
        dtype: count weights as if they had this dtype, where that makes them smaller.
        special_dtypes: count these tensors, by name, as if they had these dtypes.
        offload_buffers: as for `infer_auto_device_map`.

    Raises:
        ConfigError: the map has no device for a tensor, or is another word; a size or dtype cannot be read.
    """
    is_empty = not hasattr(model, "hf_device_map") and all(map(has_no_memory, model.parameters()))
    if device_map is None and (max_memory is not None or is_empty):
        device_map = "auto"
    limits: Mapping[int | str, int] = {}
    if max_memory is not None or isinstance(device_map, str):
        limits = limits_for(None) if max_memory is None else read_limits(max_memory)
    counted: dict[str, Any] = {"dtype": dtype, "special_dtypes": special_dtypes}
    if isinstance(device_map, str):
        counted["no_split_module_classes"] = no_split_module_classes
        device_map = planned_map(model, limits, device_map, offload_buffers=offload_buffers, **counted)
    elif device_map is not None:
        check_device_map(model, {name: str(device) for name, device in device_map.items()})
    return shown(model, device_map, limits, dtype=dtype, special_dtypes=special_dtypes)


def shown(
    model: nn.Module,
    device_map: Mapping[str, Device] | None,
    limits: Mapping[int | str, int],
    *,
    dtype: torch.dtype | CustomDtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype | str] | None = None,
) -> ShownMap:
    """Return the table of a model as a map would place it, or, without one, as it is."""
    own: Mapping[str, Device] = getattr(model, "hf_device_map", {})
    places = Places(own if device_map is None else device_map, is_plan=device_map is not None)
    sizes = _sizes_here(model, dtype=dtype, special_dtypes=special_dtypes)
    taken: dict[str, float] = {}
    for name, tensor in _tensors(model):
        kind = places.kind(name, tensor)
        taken[kind] = taken.get(kind, 0) + sizes[name]
    ties = [sorted(names, key=lambda name: name not in sizes) for names in find_tied_parameters(model)]
    return ShownMap(
        tuple(_folded(_parts(model, sizes, places))),
        taken,
        {place_of(device): limit for device, limit in limits.items()},
        tuple(f"{', '.join(others)}: the same tensor as {counted}, where it counts" for counted, *others in ties),
        places.device_map,
    )


def _parts(model: nn.Module, sizes: Mapping[str, float], places: Places) -> Iterator[Part]:
    """Yield the parts of a model: elements of containers, and modules around which there is none."""

    def walk(name: str, module: nn.Module, *, is_layer: bool) -> Iterator[Part]:
        inside = [(f"{name}.{own}".lstrip("."), tensor) for own, tensor in _tensors(module)]
        entries = {str(places.entry(full) or tensor.device) for full, tensor in inside}
        whole = name and len(entries) <= 1 and (is_layer or not any(map(_is_list, module.modules())))
        if whole and sizes.get(name, 0):
            counted = [(full, tensor) for full, tensor in inside if full in sizes]
            rests = dict.fromkeys(places.place(*one) for one in counted)
            yield Part(name, 1, sizes[name], places.device(*counted[0]), ", ".join(rests), is_layer)
        if whole:
            return
        for own, tensor in _tensors(module, recurse=False):
            full = f"{name}.{own}".lstrip(".")
            if full in sizes:
                where = places.device(full, tensor), places.place(full, tensor)
                yield Part(full, 1, sizes[full], *where, is_layer=False)
        for child, part in module.named_children():
            yield from walk(f"{name}.{child}".lstrip("."), part, is_layer=is_layer or _is_list(module))

    yield from walk("", model, is_layer=False)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, _LISTS) and len(module) > 1


def _folded(parts: Iterable[Part]) -> Iterator[Part]:
    """Put each run of equal layers, whose numbers follow each other, into one row."""

    def run_of(numbered: tuple[int, Part]) -> tuple[object, ...]:
        index, part = numbered
        parent, _, number = part.name.rpartition(".")
        if not part.is_layer or not number.isdecimal():
            return (index,)
        return (parent, int(number) - index, part.bytes, part.device, part.place)

    for _, grouped in itertools.groupby(enumerate(parts), run_of):
        first, *others = (part for _, part in grouped)
        last = others[-1].name.rpartition(".")[2] if others else ""
        yield replace(first, name=f"{first.name}-{last}", num=1 + len(others)) if others else first


def _tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and buffers; of a DTensor what this rank has of it."""
    for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
        yield name, tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sizes_here(model: nn.Module, **counted: Any) -> dict[str, float]:
    """Return the bytes of modules and tensors in this process, which of a DTensor has a part only."""
    sizes = dict(compute_module_sizes(model, **counted))
    for name, tensor in model.named_parameters():
        if hasattr(tensor, "to_local"):
            elsewhere = sizes[name] * (1 - tensor.to_local().numel() / max(1, tensor.numel()))
            parts = name.split(".")
            for depth in range(len(parts) + 1):
                sizes[".".join(parts[:depth])] -= elsewhere
    return sizes
