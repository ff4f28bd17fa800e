"""Linear layers with weights in 8 or 4 bits, by bitsandbytes, in place of those of a model.

8 bits: `LLM.int8() <https://arxiv.org/abs/2208.07339>`_. 4 bits: `QLoRA <https://arxiv.org/abs/2305.14314>`_.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nb_accelerate.base.config.checks import check_choice, check_flag, shown
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.sizes import CustomDtype
from nb_accelerate.training.bigmodel.ties import find_tied_parameters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

logger = logging.getLogger("nb_accelerate")

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_THRESHOLD = 6.0


@dataclass
class BnbQuantizationConfig:
    """Say how `load_and_quantize_model` quantises a model.

    Args:
        load_in_8bit: weights of linear layers take 8 bits. Either this or ``load_in_4bit``.
        llm_int8_threshold: with 8 bits: columns of inputs with a larger number than this are computed in 16 bits.
        load_in_4bit: weights of linear layers take 4 bits.
        bnb_4bit_quant_type: with 4 bits: the format of a weight, ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: with 4 bits: the scales of weights are quantised too.
        bnb_4bit_compute_dtype: with 4 bits: the dtype that layers compute in: ``"fp32"``, ``"fp16"``, ``"bf16"``, or a
            `torch.dtype`.
        torch_dtype: of all other weights, written likewise. By default float16 with 8 bits, and
            ``bnb_4bit_compute_dtype`` with 4 bits.
        skip_modules: names of modules that stay as they are: whole names, or parts between dots. By default the last
            module of a model with a head, and those with tied weights.
        keep_in_fp32_modules: names of modules that stay as they are, in float32.

    Raises:
        ConfigError: a field has a value that it cannot have.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = _THRESHOLD
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            check_flag(name, getattr(self, name))
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigError("Either 8 or 4 bits. Write load_in_8bit=True or load_in_4bit=True, one of them.")
        if not isinstance(self.llm_int8_threshold, (int, float)):
            raise ConfigError(f"llm_int8_threshold={shown(self.llm_int8_threshold)} is not a number.")
        self.bnb_4bit_quant_type = check_choice("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("fp4", "nf4"))
        self.bnb_4bit_compute_dtype = _as_dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            if not isinstance(getattr(self, name), (list, type(None))):
                raise ConfigError(f"{name}={shown(getattr(self, name))} is not a list of names of modules.")
        if self.load_in_4bit and self.llm_int8_threshold != _THRESHOLD:
            warnings.warn("llm_int8_threshold has no effect on weights in 4 bits.", stacklevel=3)
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _as_dtype("torch_dtype", self.torch_dtype)

    @property
    def target_dtype(self) -> torch.dtype | CustomDtype:
        """The format of quantised weights, which `infer_auto_device_map` takes."""
        return torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _as_dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else _DTYPES[check_choice(name, value, _DTYPES)]


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model has linear layers with weights in 4 bits. It imports nothing to know."""
    return any(
        kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")
        for module in model.modules()
        for kind in type(module).__mro__
    )


def modules_not_to_quantise(model: nn.Module) -> list[str]:
    """Return the names of modules that lose too much in few bits: the head, and those with tied weights."""
    tied = {name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group}
    prefix = getattr(model, "base_model_prefix", None)
    has_no_head = prefix is not None and not hasattr(model, prefix)  # a model of transformers without its last part
    children = [name for name, _ in model.named_children()]
    return sorted(tied) if has_no_head and not tied else sorted({*tied, *children[-1:]})


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Return whether a name is, or is inside of, one of some modules, which may be given by parts of names."""
    return any(f".{module}." in f".{name}." for module in modules)


def replace_linear_layers(model: nn.Module, config: BnbQuantizationConfig, kept: Collection[str]) -> list[str]:
    """Put layers of bitsandbytes in place of linear layers, without weights: they are on ``meta``."""
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and not is_within(name, kept)
    ]
    for name in names:
        model.set_submodule(name, _layer_like(model.get_submodule(name), config))
    if not names:
        logger.warning("%s has no linear layers that could be quantised.", type(model).__name__)
    return names


def _layer_like(module: Any, config: BnbQuantizationConfig) -> nn.Module:
    from bitsandbytes import nn as layers

    sizes = module.in_features, module.out_features, module.bias is not None
    if config.load_in_8bit:
        layer: nn.Module = layers.Linear8bitLt(
            *sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta"
        )
    else:
        layer = layers.Linear4bit(
            *sizes,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device="meta",
        )
    layer.train(module.training)
    return layer.requires_grad_(False)
