"""How DistributedDataParallel sends gradients: 16-bit, or as low-rank factors (PowerSGD)."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.parallel import DistributedDataParallel

    from nb_accelerate.config.kwargs import DistributedDataParallelKwargs


class DDPCommunicationHookType(str, Enum):
    """How gradients are sent between ranks: unchanged, as 16-bit numbers, or as low-rank factors."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"

    def __str__(self) -> str:
        return self.value


def register_hook(model: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Make a wrapped model send its gradients by the hook that ``options`` names."""
    # Imported when used: torch compiles a part of PowerSGD when it is imported.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[Any, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[Any, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[options.comm_hook]
    wrapper = wrappers.get(options.comm_wrapper)
    low_rank = options.comm_hook in {DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD}
    state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option) if low_rank else None
    model.register_comm_hook(state=state, hook=_anonymous(wrapper(hook) if wrapper else hook))


def _anonymous(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook under another name: torch refuses its bfloat16 hooks by name where there is no NCCL."""
    return lambda state, bucket: hook(state, bucket)  # noqa: PLW0108 - torch reads names and annotations
