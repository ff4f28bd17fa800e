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
    """Call a model's forward and convert 16-bit outputs to float32. Pickles and deep-copies with the model."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # inspect.signature follows it to the arguments of the model

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        """Bind to a model, where this decorates ``forward`` in its class."""
        return self if model is None else MethodType(self, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs. Called by the model for each batch."""
        return to_float32(self.__wrapped__(*args, **kwargs))


class AutocastForward(Float32Forward):
    """Call a model's forward under `torch.autocast` with these arguments, and convert 16-bit outputs to float32."""

    def __init__(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> None:
        super().__init__(forward)
        self.arguments = arguments

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(**self.arguments):
            outputs = self.__wrapped__(*args, **kwargs)
        return to_float32(outputs)


def restore_forward(model: nn.Module, kind: type[Float32Forward] = Float32Forward) -> nn.Module:
    """Undo what ``prepare`` did to ``model.forward``, in any precision or with one kind of forward only."""
    while isinstance(vars(model).get("forward"), kind):
        own = vars(model)["forward"].__wrapped__
        del model.forward
        if model.forward != own:  # the instance had a forward of its own before
            model.forward = own
    return model
