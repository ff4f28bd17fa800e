"""How many batches make one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from nb_accelerate.base.config.checks import check_options, check_whole
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.base.config.env import Environment


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients accumulate.

    Attributes:
        num_steps: batches for one optimizer step; None leaves it to ``gradient_accumulation_steps``.
        adjust_scheduler: count a batch that ends without an optimizer step in the scheduler's step count.
        sync_with_dataloader: close the window at the last batch of a loader, however many batches it has.
        sync_each_batch: reduce gradients over ranks after every batch: more traffic, less memory.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    _checks: ClassVar[dict[str, Any]] = {"num_steps": partial(check_whole, at_least=1)}


def resolve_accumulation(
    steps: int | None, plugin: GradientAccumulationPlugin | None, environment: Environment
) -> GradientAccumulationPlugin:
    """Choose how gradients accumulate: the plugin, else the environment, else the argument, else each batch alone."""
    # The environment counts more than the argument, as in accelerate: it is what the launcher of a finished script
    # says.
    if steps is not None:
        check_whole("gradient_accumulation_steps", steps, at_least=1)
    plugin = check_options("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
    chosen = plugin or GradientAccumulationPlugin()
    if steps is not None and chosen.num_steps is not None and steps != chosen.num_steps:
        raise ConfigError(
            f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin.num_steps={chosen.num_steps} "
            "contradict each other. Write the number in one of them only."
        )
    return replace(chosen, num_steps=chosen.num_steps or environment.gradient_accumulation_steps or steps or 1)
