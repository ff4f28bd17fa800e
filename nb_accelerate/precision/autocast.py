"""Compute a model's forward under autocast, and hand its outputs on in float32."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.config.options import note_use
from nb_accelerate.nested import to_float32
from nb_accelerate.precision.precision import Precision

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from torch import nn

    from nb_accelerate.config.kwargs import AutocastKwargs


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


class AutocastPrecision(Precision):
    """Compute in a 16-bit type where that is safe; weights and their updates stay in float32.

    Args:
        device_type: torch's name for the type of device.
        dtype: the 16-bit type.
        options: arguments of autocast.
    """

    def __init__(self, device_type: str, dtype: torch.dtype, options: AutocastKwargs) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.options = options

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        if not isinstance(model.forward, AutocastForward):
            model.forward = AutocastForward(model.forward, self._arguments(self.options))
            note_use(self.options, "the model that was prepared", advice="Set it before accelerator.prepare(model).")
        return model

    @override
    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(**self._arguments(options or self.options))

    def _arguments(self, options: AutocastKwargs) -> dict[str, Any]:
        return {
            "device_type": self.device_type,
            "dtype": self.dtype,
            "enabled": options.enabled,
            "cache_enabled": options.cache_enabled,
        }


def restore_forward(model: nn.Module) -> nn.Module:
    """Give a model the forward it had before it was prepared, whatever precision that was for."""
    while isinstance(vars(model).get("forward"), Float32Forward):
        own = vars(model)["forward"].__wrapped__
        del model.forward
        if model.forward != own:  # someone else had put a forward on the instance before us
            model.forward = own
    return model
