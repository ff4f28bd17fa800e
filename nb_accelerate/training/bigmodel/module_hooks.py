"""Hooks that change a module as a whole before it computes: its device, or the dtype of its weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from typing_extensions import override

from nb_accelerate.training.bigmodel.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from nb_accelerate.training.process import devices
from nb_accelerate.training.process.memory import clear_device_cache
from nb_accelerate.training.pytree.structures import send_to_device

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

# Layers whose weights may rest in another dtype.
_CAST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward is called. It stays on the device then, until ``init_hook`` is called.

    Args:
        execution_device: where it computes, by default the best device of this machine.
        prev_module_hook: of the model that computed before. That one goes back to the CPU first.
    """

    def __init__(
        self,
        execution_device: str | int | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = devices.best_device() if execution_device is None else execution_device

    @property
    @override
    def under_compiler(self) -> Literal["traced", "left out", "run"]:
        return "run"

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and any(w.device.type != "cpu" for w in before.model.parameters()):
            before.offload()
            clear_device_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model and its hook, as `cpu_offload_with_hook` returns them.

    Args:
        model: with the hook.
        hook: of the model.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook. The model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Return a model that comes to a device when it is called, and a handle that sends it back to the CPU.

    For several models that compute one after the other. Each has to fit on the device as a whole.

    Args:
        model: changed in place.
        execution_device: where it computes, by default the best device of this machine.
        prev_module_hook: the handle of the model that computes before. That one is sent back when this one is called.

    Examples:
        ```python
        encoder, encoder_hook = cpu_offload_with_hook(encoder, "cuda")
        decoder, decoder_hook = cpu_offload_with_hook(decoder, "cuda", prev_module_hook=encoder_hook)
        decoder(encoder(inputs))
        decoder_hook.offload()
        ```
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class LayerwiseCastingHook(ModelHook):
    """Keep the weights of a module in a small dtype, and compute in a large one.

    Args:
        storage_dtype: of the weights at rest, such as `torch.float8_e4m3fn`.
        compute_dtype: of the weights while the module computes.
        non_blocking: do not wait for the conversions.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    @property
    @override
    def under_compiler(self) -> Literal["traced", "left out", "run"]:
        return "run"

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.init_hook(module)
        return output

    @override
    def forward_failed(self, module: nn.Module) -> None:
        self.init_hook(module)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in a small dtype, and convert those of a layer to compute it.

    Examples:
        ```python
        attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern="norm|head")
        ```

    Args:
        module: changed in place.
        storage_dtype: of the weights at rest, such as `torch.float8_e4m3fn`.
        compute_dtype: of the weights while their layer computes.
        skip_modules_pattern: leave out modules whose names have a match of one of these regular expressions.
        skip_modules_classes: leave out modules of these classes.
        non_blocking: do not wait for the conversions.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    for layer in _layers_to_cast("", module, patterns, skip_modules_classes or ()):
        add_hook_to_module(layer, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)


def _layers_to_cast(
    name: str, module: nn.Module, patterns: Collection[str], classes: tuple[type[nn.Module], ...]
) -> Iterator[nn.Module]:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, _CAST):
        yield module
        return
    for child, part in module.named_children():
        yield from _layers_to_cast(f"{name}.{child}" if name else child, part, patterns, classes)
