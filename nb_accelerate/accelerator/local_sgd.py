"""Train on each rank alone for a while, then average the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.config.checks import check_whole
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import contextlib
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from nb_accelerate.accelerator.accelerator import Accelerator


class LocalSGD:
    """A block in which gradients stay on their rank, and weights are averaged every few optimizer steps.

    Saves traffic on slow networks, for results that differ from those of ordinary training. Example::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    local_sgd.step()

    Args:
        accelerator: who prepared the model.
        model: what ``prepare`` returned.
        local_sgd_steps: optimizer steps between averages.
        enabled: False leaves training as it is.

    Raises:
        ConfigError: ``local_sgd_steps`` is not a whole number above 0, the Accelerator accumulates gradients in a
            way that synchronises every batch, or its strategy shards models.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        self.local_sgd_steps = check_whole("local_sgd_steps", local_sgd_steps, at_least=1)
        self.accelerator = accelerator
        self.model = model
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._block: contextlib.AbstractContextManager[Any] | None = None
        if self.enabled:
            accelerator.core.strategy.check_supports("LocalSGD")
        if self.enabled and accelerator.core.accumulation.sync_each_batch:
            raise ConfigError(
                "LocalSGD keeps gradients on their rank, but GradientAccumulationPlugin(sync_each_batch=True) sends "
                "them after every batch. Leave one of them out."
            )

    def __enter__(self) -> Self:
        if self.enabled:
            self._block = self.accelerator.no_sync(self.model)
            self._block.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._block is not None:
            self._block.__exit__(kind, error, trace)
            self._block = None
            if error is None:  # a rank that failed has no partner to average with
                self._average()

    def step(self) -> None:
        """Count a batch, and average weights if it is time. Call it after ``optimizer.step``."""
        if not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        means = self.accelerator.reduce([weight.detach() for weight in weights], reduction="mean")
        for weight, mean in zip(weights, means, strict=True):
            weight.copy_(mean)
