"""Estimate where a model's weights are while it only computes: in float16, and as bitsandbytes quantises them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nb_accelerate.training.bigmodel.device_map import planned_map
from nb_accelerate.training.bigmodel.device_memory import gpus_in
from nb_accelerate.training.bigmodel.map_picture import size
from nb_accelerate.training.bigmodel.resting_places import DISK, MEMORY, place_of
from nb_accelerate.training.bigmodel.shown_map import shown
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.training.bigmodel.shown_map import ShownMap

PRECISIONS = {"float16": 16, "8 bits": 8, "4 bits": 4}
"""Rows of the estimate, with the bits of a weight of a linear layer."""

_BLOCK_SIZE = 64
"""Weights of bitsandbytes' 4-bit formats that share a scale, which has 32 bits (Dettmers et al., QLoRA, 2023)."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Where the weights of a model are, in one precision, on one machine.

    Attributes:
        precision: a name in `PRECISIONS`.
        weights: bytes of parameters and buffers.
        layers: numbers of layers by resting place.
        shown: the device map of ``"auto"``, part by part.
        visitor: bytes of the largest part that visits a GPU to be computed with; 0 without visitors.
        unquantised: bytes in float16 of what is not on a GPU, where a quantised model has such parts; else 0.
    """

    precision: str
    weights: float
    layers: Mapping[str, int]
    shown: ShownMap
    visitor: float
    unquantised: float

    @property
    def gpus(self) -> list[str]:
        """The GPUs that have a part of the model."""
        return [place for place in self.shown.places if place not in (MEMORY, DISK)]

    @property
    def cells(self) -> dict[str, str]:
        """What rests in each place: ``17 layers, 6.61 GiB``."""
        return {
            place: (f"{self.layers[place]} layers, " if place in self.layers else "") + size(taken)
            for place, taken in self.shown.places.items()
        }

    @property
    def sentence(self) -> str:
        """What that means."""
        away = {place: self.shown.places[place] for place in (MEMORY, DISK) if self.shown.places.get(place)}
        if not self.gpus:
            from_disk = f", of which it reads {size(away[DISK])} from the disk for each token" if DISK in away else ""
            return f"The CPU computes all of it{from_disk}."
        if self.unquantised:
            return (
                f"The GPUs are too small by {size(sum(away.values()))}. bitsandbytes quantises on GPUs only; what is "
                f"elsewhere would stay in float16, {size(self.unquantised)}."
            )
        if away:
            ways = [f"{size(taken)} from {'memory' if place == MEMORY else DISK}" for place, taken in away.items()]
            return f"For each token {self.gpus[0]} is sent {' and '.join(ways)}."
        first, *others = self.gpus
        if others and self.weights < self.shown.limits[first]:
            left = self.shown.limits[first] - self.weights
            return f"{first} is enough for all of it, with {size(left)} left for activations and the KV cache."
        left = sum(self.shown.limits[gpu] - self.shown.places[gpu] for gpu in self.gpus)
        return f"All of it is on {' and '.join(self.gpus)}, with {size(left)} left for activations and the KV cache."


def estimate_fit(model: nn.Module, precision: str, limits: Mapping[int | str, int]) -> Fit:
    """Return where ``device_map="auto"`` puts a model. With 8 or 4 bits its linear layers are quantised, in place.

    Args:
        model: with float16 weights, of which only the shapes matter.
        limits: bytes by device, as `get_max_memory` returns them.
    """
    in_float16 = compute_module_sizes(model)
    bits = PRECISIONS[precision]
    if bits < 16:
        quantise_shapes(model, bits)
    device_map = planned_map(model, limits)
    found = shown(model, device_map, limits)
    layers: dict[str, int] = {}
    for part in found.parts:
        if part.is_layer:
            layers[part.place] = layers.get(part.place, 0) + part.num
    away = [name for name, device in device_map.items() if gpus_in(limits) and device in ("cpu", "disk")]
    places = {place_of(device) for device in ("cpu", "disk") if away}
    return Fit(
        precision=precision,
        weights=compute_module_sizes(model)[""],
        layers=layers,
        shown=found,
        visitor=max((part.bytes for part in found.parts if part.place in places), default=0),
        unquantised=sum(in_float16[name] for name in away) if bits < 16 else 0,
    )


def quantise_shapes(model: nn.Module, bits: int) -> None:
    """Give the linear layers of a model weights of the shapes that bitsandbytes gives them, with their scales.

    The output embedding stays as it is, as with transformers.

    Args:
        bits: 8, with a scale of 32 bits for each output, or 4, with one for each 64 weights.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            weight = module.weight
            shape = tuple(weight.shape) if bits == 8 else (math.ceil(weight.numel() / 2), 1)
            scales = weight.shape[0] if bits == 8 else math.ceil(weight.numel() / _BLOCK_SIZE)
            values = torch.empty(shape, dtype=torch.uint8, device=weight.device)
            module.weight = nn.Parameter(values, requires_grad=False)
            module.register_buffer("scales", torch.empty(scales, dtype=torch.float32, device=weight.device))


def kv_cache(config: Any) -> int | None:
    """Return the bytes of keys and values that one token adds to the cache, in float16; None if a config lacks sizes.

    Args:
        config: of a transformers model. Attention to a window only, or compressed keys, are not looked at.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not layers or not heads or not width:
        return None
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    head_width = getattr(text, "head_dim", None) or width // heads
    return int(2 * layers * key_heads * head_width * torch.float16.itemsize)
