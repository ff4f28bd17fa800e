"""Every rank has the whole model; gradients are averaged while backward runs (DistributedDataParallel)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from nb_accelerate.config.options import note_use
from nb_accelerate.errors import NotPreparedError
from nb_accelerate.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import nn

    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.kwargs import DistributedDataParallelKwargs


class DDPStrategy(Strategy):
    """Train with DistributedDataParallel.

    Args:
        device: where models live.
        collectives: how ranks talk to each other.
        options: arguments of DistributedDataParallel.
        pass_device_ids: whether to tell it the number of the device; on a CPU it wants none.
    """

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        *,
        options: DistributedDataParallelKwargs,
        pass_device_ids: bool,
    ) -> None:
        super().__init__(device, collectives)
        self._options = options
        self._device_ids = [device] if pass_device_ids else None
        self._as_they_were: WeakSet[nn.Module] = WeakSet()  # prepared, with no gradients to send

    @override
    def prepare_model(self, model: nn.Module, *, place: bool = True, training: bool = True) -> nn.Module:
        prepared = super().prepare_model(model, place=place, training=training)
        if prepared is model:
            self._as_they_were.add(model)
        return prepared

    @override
    def use_ddp_options(self, options: DistributedDataParallelKwargs) -> None:
        self._options = options

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model  # torch refuses to wrap a model without anything to train
        wrapped = DistributedDataParallel(
            model,
            device_ids=self._device_ids,
            output_device=self._device_ids and self.device,
            **self._options.to_ddp(),
        )
        self._options.register_comm_hook(wrapped)
        note_use(self._options, "the model that was prepared", advice="Set it before accelerator.prepare(model).")
        return wrapped

    @override
    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        wrapped = _wrapped(model)
        if wrapped is None:
            yield
            return
        model = wrapped
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # What a forward outside of no_sync does: get the buckets ready. No outputs are searched for parameters
        # without a gradient, since there may have been several forwards.
        model.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @override
    def join(self, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        return Join([wrapped for model in models if (wrapped := _wrapped(model)) is not None])

    @override
    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        block = contextlib.ExitStack()
        for model in models:
            wrapped = _wrapped(model)
            if wrapped is not None:
                block.enter_context(wrapped.no_sync())
            elif getattr(model, "_orig_mod", model) not in self._as_they_were:
                raise NotPreparedError(
                    f"accumulate or no_sync was given a {type(model).__name__} that did not come out of prepare, so "
                    "its gradients cannot be kept from travelling. Give it what prepare returned: "
                    "model = accelerator.prepare(model)."
                )
        return block


def _wrapped(model: nn.Module) -> DistributedDataParallel | None:
    """Return the wrapper of a prepared model, also of one that was compiled afterwards; None if it has none."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, DistributedDataParallel) else None
