"""`LocalSGD`: average weights every few optimizer steps, instead of gradients at each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import contextlib
    from types import TracebackType

    from torch import nn
    from typing_extensions import Self

    from nb_accelerate.training.accelerator.accelerator import Accelerator


class LocalSGD:
    """Train each rank alone inside a block, and average the weights of all ranks every few optimizer steps.

    This saves communication on slow networks. Results differ from those of ordinary training.

    Examples:
        ```python
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        ```

    Args:
        accelerator: the `Accelerator` that prepared the model.
        model: a model that ``prepare`` returned.
        local_sgd_steps: number of optimizer steps between two averages.
        enabled: False changes nothing: gradients are averaged as usual.

    Raises:
        ConfigError: ``local_sgd_steps`` is not a whole number above 0, the Accelerator synchronises gradients after
            every batch (``sync_each_batch=True``), or its strategy shards models.
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
                "LocalSGD keeps gradients local, but GradientAccumulationPlugin(sync_each_batch=True) averages them "
                "after every batch. Leave one of them out."
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
            if error is None:  # after an error the other ranks may not average
                self._average()

    def step(self) -> None:
        """Count an optimizer step, and average weights if it is time. Call it after ``optimizer.step``."""
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
