"""The stand-in for torch's DistributedDataParallel, whose reducer runs in no group that exchanges nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from nb_accelerate.training.strategies.ddp import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class RehearsedDDP(DistributedDataParallel):
    """Calls the model, and knows what its backward would exchange and which parameters it has reached.

    Attributes:
        exchanges: whether the backward of the last forward averages gradients.
        sends_buffers: whether a forward begins with the buffers of rank 0.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.process_group: Any = dist.group.WORLD
        self.device_ids = self.output_device = None
        self.static_graph = bool(options.get("static_graph"))
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._comm_hooks: list[Any] = []
        self._join_config = SimpleNamespace(enable=False)
        self._finds_unused = bool(options.get("find_unused_parameters"))
        self._syncs_buffers = bool(options.get("broadcast_buffers", True)) and any(True for _ in module.buffers())
        self._reached = set[int]()
        self._is_computed = False
        self.exchanges = False
        self.note_parameters()
        for parameter in self.averaged:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._reached.clear()
        self._is_computed = True
        return self.module(*inputs, **kwargs)

    def begin_forward(self) -> None:
        """Note what the backward of a forward that begins now would do, whether it is computed or not."""
        self._is_computed = False
        self.exchanges = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.exchanges:
            self.note_prepared()

    @property
    def sends_buffers(self) -> bool:
        """Whether a forward that begins now sends the buffers of rank 0 to all."""
        return self._syncs_buffers and self.require_forward_param_sync

    def _arrived(self, parameter: Tensor) -> None:
        self._reached.add(id(parameter))

    def _check_reducer_finalized(self) -> None:
        if self._is_computed and self.exchanges and not self._finds_unused:
            missed = [parameter for parameter in self.averaged if id(parameter) not in self._reached]
            if missed and self._reached:
                raise RuntimeError("gradients are missing")

    @override
    def register_comm_hook(self, state: object, hook: Any) -> None:
        self._comm_hooks.append((hook, state))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back in a block."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def averaging_nothing(plain: Callable[..., None], tell: Callable[[str], None]) -> Callable[..., None]:
    """Return ``__init__`` of torch's DistributedDataParallel, for models that users wrap: it exchanges nothing."""

    def exchange(name: str, bucket: Any) -> Any:
        if bucket.is_last():
            tell(f"the gradients of {name}")
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain(self, module, *args, **kwargs)
        hook = lambda name, bucket: exchange(name, bucket)  # noqa: E731, PLW0108 - torch reads annotations, here texts
        self.register_comm_hook(type(module).__name__, hook)

    return init
