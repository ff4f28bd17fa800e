"""The choice of ``mixed_precision``, and how linear layers compute in 8-bit numbers with ``"fp8"``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice
from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.config.env import Environment

_BACKEND = "ACCELERATE_FP8_BACKEND"
_OTHER_BACKENDS = {"te": "TransformerEngine", "msamp": "MS-AMP"}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How torchao trains linear layers in 8-bit numbers. Names are accelerate's.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; None makes one of the fields below.
        module_filter_func: takes a layer and its name and returns whether it computes in 8 bits. None chooses linear
            layers whose sizes are multiples of 16, but the first and the last of the model, which need more digits.
        pad_inner_dim: fill up with zeros what the matrix units need a multiple of 16 of, the rows of a batch say. None
            takes ``ACCELERATE_FP8_PAD_INNER_DIM``, and True without it.
        enable_fsdp_float8_all_gather: not supported in this version: FSDP gathers weights in bfloat16. False or None;
            ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``, which accelerate's configuration sets, is not read.

    Raises:
        ConfigError: a value is of the wrong type, or not supported.
    """

    config: Any = None
    module_filter_func: Callable[[Any, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    @override
    def _check(self) -> None:
        super()._check()
        if self.config is not None and self.pad_inner_dim is not None:
            raise ConfigError("AORecipeKwargs was given config and pad_inner_dim. Write it in the config only.")
        if self.enable_fsdp_float8_all_gather or getattr(self.config, "enable_fsdp_float8_all_gather", False):
            raise ConfigError(
                "enable_fsdp_float8_all_gather=True asks FSDP to gather weights in 8 bits, which is not supported in "
                "this version. Leave it out: they are gathered in bfloat16, and layers compute in 8 bits."
            )


def resolve_precision(argument: PrecisionType | str | None, environment: Environment) -> PrecisionType:
    """Choose the precision: the argument, else ``ACCELERATE_MIXED_PRECISION``, else none."""
    name = "mixed_precision" if argument is not None else "ACCELERATE_MIXED_PRECISION"
    chosen = argument or environment.text("ACCELERATE_MIXED_PRECISION") or PrecisionType.NO
    return PrecisionType(check_choice(name, chosen, PrecisionType.list()))


def resolve_fp8(
    precision: PrecisionType, given: AORecipeKwargs | None, environment: Environment
) -> AORecipeKwargs | None:
    """Choose how layers compute in 8 bits: the argument, then variables. None if they compute in another precision."""
    if precision is not PrecisionType.FP8:
        if given is not None:
            raise ConfigError(
                f"AORecipeKwargs was given with mixed_precision={str(precision)!r}, and says how layers compute in 8 "
                "bits. Write mixed_precision='fp8', or leave it out."
            )
        return None
    backend = check_choice(_BACKEND, environment.text(_BACKEND) or "ao", ("ao", "no", *_OTHER_BACKENDS))
    if backend in _OTHER_BACKENDS:
        raise ConfigError(
            f"{_BACKEND}={backend} asks for {_OTHER_BACKENDS[backend]}, which is not supported in this version. Layers "
            f"are trained in 8 bits by torchao: write {_BACKEND}=AO, or unset it."
        )
    chosen = given or AORecipeKwargs()
    if chosen.config is None and chosen.pad_inner_dim is None:
        pads = environment.flag("ACCELERATE_FP8_PAD_INNER_DIM")
        chosen = replace(chosen, pad_inner_dim=True if pads is None else pads)
    return chosen
