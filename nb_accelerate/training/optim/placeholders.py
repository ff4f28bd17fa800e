"""Stand-ins for an optimizer and a scheduler that a DeepSpeed configuration describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from nb_accelerate.errors import NotPreparedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class DummyOptim(torch.optim.Optimizer):
    """Stand for the optimizer that a DeepSpeed configuration describes, until ``prepare`` returns that one.

    Args:
        params: parameters, or dicts of parameter groups.
        lr: the learning rate, where the configuration says ``"auto"``.
        weight_decay: the weight decay, where the configuration says ``"auto"``.
        **kwargs: other values for ``"auto"``, ``betas`` and ``eps`` say.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        self.params: list[Any] = list(params)
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs
        groups = [
            dict(group) if isinstance(group, dict) else group for group in self.params
        ]  # torch adds options to them
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @override
    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise NotPreparedError(
            "A DummyOptim trains nothing: it stands for the optimizer of a DeepSpeed configuration. Write model, "
            "optimizer = accelerator.prepare(model, optimizer), with Accelerator(deepspeed_plugin=...) and an "
            '"optimizer" in its configuration; without DeepSpeed, make an optimizer of torch.optim.'
        )


class DummyScheduler(LRScheduler):
    """Stand for the scheduler that a DeepSpeed configuration describes, until ``prepare`` returns that one.

    Args:
        optimizer: the `DummyOptim`, or an optimizer of yours.
        total_num_steps: steps of the schedule on one process, where the configuration says ``"auto"``.
        warmup_num_steps: steps in which the learning rate rises, where the configuration says ``"auto"``.
        lr_scheduler_callable: makes the scheduler from the optimizer that DeepSpeed has made, in place of the
            configuration.
        **kwargs: kept, for ported code.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # LRScheduler.__init__ is not called: it changes the optimizer.
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    @override
    def step(self, epoch: int | None = None) -> NoReturn:
        raise NotPreparedError(
            "A DummyScheduler changes nothing: it stands for the scheduler of a DeepSpeed configuration. Write "
            "accelerator.prepare(model, optimizer, scheduler), with Accelerator(deepspeed_plugin=...); without "
            "DeepSpeed, make a scheduler of torch.optim.lr_scheduler."
        )
