"""Layers that compute in 8 bits: find them in a model, and put them into one without an `Accelerator`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.precision import AORecipeKwargs
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.errors import MissingDependencyError
from nb_accelerate.training.precision.fp8 import replace_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has linear layers that torchao trains in 8 bits."""
    return _has_layers(model, "torchao.float8.")


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine."""
    return _has_layers(model, "transformer_engine.")


def _has_layers(model: nn.Module, package: str) -> bool:
    # By name: what was not imported has made no layers.
    return any(type(layer).__module__.startswith(package) for layer in model.modules())


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function refuse to run where torchao is not installed. A decorator."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        """Check, and call the function."""
        if not is_installed("torchao"):
            raise MissingDependencyError("torchao", needed_for=func.__name__)
        return func(*args, **kwargs)

    return checked


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[Any, str], bool] | None = None
) -> None:
    """Replace linear layers of a model by torchao's, which compute in 8 bits. They have the same weights and names.

    Args:
        model: changed in place.
        config: see `AORecipeKwargs`.
        module_filter_func: see `AORecipeKwargs`.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    replace_layers(model, AORecipeKwargs(config=config, module_filter_func=module_filter_func))
