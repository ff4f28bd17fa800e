"""Replacements of ``model.forward`` that compute under autocast and return outputs in float32."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.training.pytree import to_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Float32Forward:
    """Call a model's forward and convert 16-bit outputs to float32. Pickles and deep-copies with the model.

    Args:
        forward: the model's own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # inspect.signature follows it to the arguments of the model

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        """Bind to a model, where this decorates ``forward`` in its class."""
        return self if model is None else MethodType(self, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs. Called by the model for each batch."""
        return to_float32(self.__wrapped__(*args, **kwargs))


class AutocastForward(Float32Forward):
    """Call a model's forward under autocast and convert 16-bit outputs to float32.

    Args:
        forward: the model's own forward.
        arguments: those of `torch.autocast`.
    """

    def __init__(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> None:
        super().__init__(forward)
        self.arguments = arguments

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(**self.arguments):
            outputs = self.__wrapped__(*args, **kwargs)
        return to_float32(outputs)


def restore_forward(model: nn.Module) -> nn.Module:
    """Undo all that ``prepare`` did to ``model.forward``, in any precision, and return the model."""
    while isinstance(vars(model).get("forward"), Float32Forward):
        own = vars(model)["forward"].__wrapped__
        del model.forward
        if model.forward != own:  # the instance had a forward of its own before
            model.forward = own
    return model


def without_autocast(model: nn.Module) -> nn.Module:
    """Remove the `AutocastForward` of another `Accelerator`, and return the model. A `Float32Forward` is kept."""
    present = vars(model).get("forward")
    if isinstance(present, AutocastForward):
        del model.forward
        if model.forward != present.__wrapped__:
            model.forward = present.__wrapped__
    return model
