"""What takes the place of a model's forward: it hands outputs on in float32, and may compute under autocast."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.pytree import to_float32

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


class Float32Forward:
    """A model's forward whose 16-bit outputs are handed on in float32. Pickles and deep-copies with the model.

    Args:
        forward: the model's own forward.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__wrapped__ = forward  # inspect.signature follows it to the arguments of the model

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        """Be the method of a model, where this decorates its class's."""
        return self if model is None else MethodType(self, model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs. Called by the model for each batch."""
        return to_float32(self.__wrapped__(*args, **kwargs))


class AutocastForward(Float32Forward):
    """A model's forward under autocast; sits in place of ``model.forward``.

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
    """Give a model the forward it had before it was prepared, whatever precision that was for."""
    while isinstance(vars(model).get("forward"), Float32Forward):
        own = vars(model)["forward"].__wrapped__
        del model.forward
        if model.forward != own:  # someone else had put a forward on the instance before us
            model.forward = own
    return model


def without_autocast(model: nn.Module) -> nn.Module:
    """Take a model out of the precision that another `Accelerator` prepared it for; other changes stay."""
    present = vars(model).get("forward")
    if isinstance(present, AutocastForward):
        del model.forward
        if model.forward != present.__wrapped__:
            model.forward = present.__wrapped__
    return model
