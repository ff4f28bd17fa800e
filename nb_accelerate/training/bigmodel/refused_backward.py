"""Refuse to compute gradients through weights that are gone by then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import PlacedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Refusal(torch.autograd.Function):
    """Give a tensor that was computed without a graph a history that cannot be gone back through."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, message: str, computed: list[Tensor]) -> Tensor:
        ctx.message = message
        return computed[0]

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        raise PlacedModelError(ctx.message)


def refuse_backward(module: str, device: torch.device | None) -> Callable[[Tensor], Tensor]:
    """Return a function that gives outputs of a block a history whose backward raises a `PlacedModelError`."""
    message = (
        f"backward comes to a {module}, whose weights are on {device} only while it computes. Train LoRA on weights "
        "that stay on the device (quantised ones take less room), or the whole model with FSDP: "
        "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=True))."
    )

    def refuse(output: Tensor) -> Tensor:
        if output.requires_grad or not output.is_floating_point():
            return output
        anchor = torch.empty(0, requires_grad=True)
        made: Tensor = _Refusal.apply(anchor, message, [output])  # type: ignore[no-untyped-call]
        return made

    return refuse
