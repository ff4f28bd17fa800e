"""Watch the calls of a prepared model: what a forward and its backward exchange, and what to return without computing.

What is returned in place of outputs that were computed before has a backward: it tells of the exchange of gradients,
and reaches models that made the inputs.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from nb_accelerate.training.pytree import map_tensors, tensors_in
from nb_accelerate.training.rehearsal.wrapper import RehearsedDDP
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_CALL = "_compiled_call_impl"
"""What torch calls in place of a model; see `training.accelerator.phases`."""


def watch_calls(
    model: nn.Module, tell: Callable[[str], None], is_fast: Callable[[], bool], *, is_sharded: bool
) -> None:
    """Watch the calls of a prepared model.

    Args:
        tell: called with what ranks do together.
        is_fast: whether nothing is computed any more.
    """
    if isinstance(model, RehearsedDDP):
        tell(f"the weights of {_name(model)}")
    vars(model)[_CALL] = _WatchedCall(model, tell, is_fast, is_sharded=is_sharded)


def _name(model: Any) -> str:
    return type(innermost(model)).__name__.removeprefix("FSDP")  # which torch puts before


class _WatchedCall:
    """Calls a model, or returns what it has returned for inputs of the same shapes."""

    def __init__(
        self, model: nn.Module, tell: Callable[[str], None], is_fast: Callable[[], bool], *, is_sharded: bool
    ) -> None:
        self._model: Any = weakref.ref(model)
        self._tell = tell
        self._is_fast = is_fast
        self._is_sharded = is_sharded
        self._exchanges = False  # whether the next backward averages gradients
        self._known: dict[Any, tuple[Any, list[bool]]] = {}  # outputs, and which of them have gradients

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        wrapped = getattr(model, "_orig_mod", model)
        exchanges = self._is_sharded
        if isinstance(wrapped, RehearsedDDP):
            wrapped.begin_forward()
            exchanges = wrapped.exchanges
            if wrapped.sends_buffers:
                self._tell(f"the buffers of {_name(model)}")
        elif self._is_sharded:
            self._tell(f"the shards of {_name(model)}")
        if torch.is_grad_enabled():
            self._exchanges = exchanges
        given = tensors_in((args, kwargs))
        shapes = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in given]
        key = (*shapes, *sorted(kwargs), torch.is_grad_enabled(), model.training)
        if self._is_fast() and key in self._known:
            return self._remembered(*self._known[key], [tensor for tensor in given if tensor.requires_grad])
        outputs = wrapped._call_impl(*args, **kwargs)  # noqa: SLF001 - what torch calls otherwise
        made = tensors_in(outputs)
        self._known[key] = map_tensors(Tensor.detach, outputs), [tensor.requires_grad for tensor in made]
        for tensor in made:
            if exchanges and tensor.requires_grad:
                tensor.register_hook(self._exchange)  # type: ignore[no-untyped-call]
        return outputs

    def _exchange(self, _: Tensor | None = None) -> None:
        """Tell of the exchange of gradients, when the first gradient of outputs comes in a backward."""
        if self._exchanges:
            self._exchanges = False
            self._tell(f"the gradients of {_name(self._model())}")

    def _after_backward(self) -> None:
        """Leave gradients, which are clipped next, and tell of their exchange."""
        for parameter in self._model().parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._exchange()

    def _remembered(self, known: Any, trained: list[bool], inputs: Sequence[Tensor]) -> Any:
        """Return outputs as they were before, with a backward that reaches the inputs and tells."""
        before = list(zip(tensors_in(known), trained, strict=True))
        old = [tensor for tensor, is_trained in before if is_trained]
        anchor = torch.zeros((), requires_grad=True)
        new = iter(_Remembered.apply(self._after_backward, old, anchor, *inputs) if old else ())  # type: ignore[no-untyped-call]
        every = iter([next(new) if is_trained else tensor.clone() for tensor, is_trained in before])
        return map_tensors(lambda _: next(every), known)


class _Remembered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tell: Callable[[], None], outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(output.clone() for output in outputs)

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.tell()
        return None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)
