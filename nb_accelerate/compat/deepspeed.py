"""What scripts written for accelerate ask about DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.state import AcceleratorState

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin


def get_active_deepspeed_plugin(state: AcceleratorState) -> DeepSpeedPlugin:
    """Return the plugin that counts for what is prepared now.

    Raises:
        ConfigError: DeepSpeed does not train.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigError(
            "There is no DeepSpeed plugin: models are trained without DeepSpeed. Write "
            "Accelerator(deepspeed_plugin=DeepSpeedPlugin(...))."
        )
    return plugin


def deepspeed_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function refuse to run where DeepSpeed does not train. A decorator."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        """Check, and call the function."""
        if AcceleratorState().distributed_type is not DistributedType.DEEPSPEED:
            raise ConfigError(
                f"{func.__name__} needs DeepSpeed, and models are trained without it. Write "
                "Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)) first."
            )
        return func(*args, **kwargs)

    return checked


def GatheredParameters(  # noqa: N802 - accelerate's name
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which parameters of stage 3 are whole; without DeepSpeed, a block that does nothing.

    Args:
        params: a parameter, or several.
        modifier_rank: the rank whose changes are sent to all; None if the block only reads.
        fwd_module: the module whose forward uses them, where that is another one.
        enabled: False makes the block do nothing.
    """
    if AcceleratorState().distributed_type is not DistributedType.DEEPSPEED:
        return contextlib.nullcontext()
    import deepspeed

    block: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled
    )
    return block
