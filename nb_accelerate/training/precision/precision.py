"""`Precision`: the interface of all precisions, whose defaults compute in the dtype of the model; and autocast.

A precision gives each optimizer an `OptimizerStep`, which takes its steps.
"""

from __future__ import annotations

import contextlib
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.pytree import to_float32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.config.kwargs import AutocastKwargs


class OptimizerStep:
    """Take the steps of one optimizer. Made by `Precision.bind`, once per prepared optimizer.

    `skipped`: the last step was not taken because gradients were infinite. `unscales`: `unscale` has anything to do.
    """

    skipped = False
    unscales = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step. Called by the prepared optimizer when an accumulation window closes."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def unscale(self) -> None:
        """Divide gradients by the loss scale, at most once per step. Called before clipping."""

    def discard(self) -> None:
        """Note that gradients were dropped. Called by ``zero_grad``."""


class GivenScalerStep(OptimizerStep):
    """Take the steps of one optimizer with the user's own scaler, which scales no other losses, and update it."""

    unscales = True

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optimizer)
        self._scaler = scaler
        self._unscaled = False

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        refuse_closure(closure)
        before = self._scaler.get_scale()
        result = self._scaler.step(self.optimizer)
        self._scaler.update()
        self._unscaled = False
        self.skipped = self._scaler.get_scale() < before  # the scale shrinks only where gradients were infinite
        return result

    @override
    def unscale(self) -> None:
        if not self._unscaled:
            self._scaler.unscale_(self.optimizer)
            self._unscaled = True

    @override
    def discard(self) -> None:
        if self._unscaled:
            self._scaler.update()
            self._unscaled = False


def refuse_closure(closure: Callable[[], float] | None) -> None:
    """Refuse a closure: the gradients it computes would not be unscaled."""
    if closure is not None:
        raise ConfigError(
            "optimizer.step was given a closure, which cannot work with mixed_precision='fp16': the closure's "
            "gradients would never be unscaled. Use mixed_precision='bf16' or 'no' for optimizers such as LBFGS."
        )


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
        forward = vars(model)["forward"].__wrapped__
        del model.forward
        if model.forward != forward:  # the instance had a forward of its own before
            model.forward = forward
    return model


class Precision:
    """Compute in the dtype that the model has."""

    name = "no"
    dtype: torch.dtype | None = None  # that models compute in; None for the model's own
    scaler: torch.amp.GradScaler | None = None

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Make the forward of a model compute in this precision. Called by ``prepare``, before the strategy."""
        return restore_forward(model, AutocastForward)  # of another `Accelerator`

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block that computes in this precision. Called by users around a loss function."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss of shape ``()``. Called once per batch."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def without_scale(self, norm: Tensor, parameters: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Return a norm of gradients divided by the loss scale, without waiting for the device."""
        return norm

    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        """Return what takes the steps of an optimizer in this precision. Called by ``prepare``."""
        return OptimizerStep(optimizer)


class AutocastPrecision(Precision):
    """Compute in a 16-bit dtype where autocast does; weights and optimizer state stay in float32.

    bfloat16 has the range of float32, so gradients need no scaling.
    """

    name = "bf16"

    def __init__(self, device_type: str, dtype: torch.dtype, options: AutocastKwargs) -> None:
        self.device_type = device_type
        self.dtype: torch.dtype = dtype
        self.options = options

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        arguments = self._arguments(self.options)
        present = model.forward
        if not isinstance(present, AutocastForward) or present.arguments != arguments:
            restore_forward(model, AutocastForward)
            model.forward = AutocastForward(model.forward, arguments)
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
