"""Begin `Phase.FORWARD` where a prepared model is called: what a loop does with a batch before is no forward.

A hook of the model would do, and would make the call of each model slower by two microseconds, would be saved with it,
and be refused by TorchScript. What `torch.nn.Module.compile` sets is called in place of the model, and torch leaves it
out when the model is saved or copied.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.progress_page import Phase, here

if TYPE_CHECKING:
    from torch import nn

_FORWARD = Phase.FORWARD  # Python 3.11 looks members of an enum up slowly
_CALL = "_compiled_call_impl"


class _TimedCall:
    """Calls a model, and says so before."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # so that the model goes when its last user does
        self._compiled = vars(model).get(_CALL)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model is not compiled, and not timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            page = here()
            page.enter(_FORWARD)
            page.saw_forward = True
        model: Any = self._model()
        call = self._compiled or model._call_impl  # noqa: SLF001 - what torch calls unless the model is compiled
        return call(*args, **kwargs)


def time_forward(model: nn.Module) -> None:
    """Make each call of a prepared model begin `Phase.FORWARD`, where somebody may read the page of this process."""
    page = here()
    if page.is_read:
        page.saw_forward = page.saw_forward or False
        if not isinstance(vars(model).get(_CALL), _TimedCall):
            vars(model)[_CALL] = _TimedCall(model)
