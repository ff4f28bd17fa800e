"""Models whose weights are made on another device, or take no memory at all."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Make models whose parameters have shapes and take no memory, on the device ``meta``.

    Args:
        include_buffers: buffers too. Their values are lost, also of buffers that no checkpoint has.

    Examples:
        ```python
        with init_empty_weights():
            model = nn.Linear(10_000, 10_000)
        model.weight.device  # meta
        ```
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False) -> Iterator[None]:
    """Make models whose parameters are on a device. For modules that this thread makes.

    Args:
        device: of the parameters.
        include_buffers: buffers too, and all tensors that a module makes without naming a device.
    """
    device, thread = torch.device(device), threading.get_ident()

    def parameter(_module: nn.Module, _name: str, made: nn.Parameter | None) -> nn.Parameter | None:
        if made is None or thread != threading.get_ident() or made.device == device:
            return None
        # Subclasses, of quantised weights say, take what they hold as arguments.
        arguments: dict[str, Any] = {**made.__dict__, "requires_grad": made.requires_grad}
        return type(made)(made.to(device), **arguments)

    def buffer(_module: nn.Module, _name: str, made: torch.Tensor | None) -> torch.Tensor | None:
        return None if made is None or thread != threading.get_ident() else made.to(device)

    with contextlib.ExitStack() as hooks:
        hooks.callback(register_module_parameter_registration_hook(parameter).remove)  # type: ignore[arg-type]
        if include_buffers:
            hooks.callback(register_module_buffer_registration_hook(buffer).remove)  # type: ignore[arg-type]
            hooks.enter_context(device)
        yield
