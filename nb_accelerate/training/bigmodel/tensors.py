"""Put parameters, buffers and inputs of modules on devices: one by one, for a while, or when they are made."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from nb_accelerate.errors import ConfigError, PlacedModelError
from nb_accelerate.training.bigmodel.sizes import as_dtype
from nb_accelerate.training.process import context
from nb_accelerate.training.process.memory import clear_device_cache
from nb_accelerate.training.pytree import is_on, send_to_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Device = int | str | torch.device


QUANTISED = {"Int8Params", "FP4Params", "Params4bit"}
"""Parameters of bitsandbytes, by name: importing it takes seconds. They are quantised when they leave a CPU."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: dict[int, dict[Device, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or a buffer on a device, and give it a value if one is given.

    A parameter that moves or gets a value is replaced by a new one of the same class.

    Args:
        module: which has the tensor.
        tensor_name: its name in the module, with dots if a submodule owns it.
        device: where it goes.
        value: of the same shape. One that was on ``meta`` needs it.
        dtype: by default as the tensor there has. Integers keep theirs.
        fp16_statistics: scales of the rows of a weight that bitsandbytes has quantised to 8 bits.
        tied_params_map: for tied tensors, so that there is one on each device: tensors by device, by ``data_ptr()`` of
            the tensor that they were made of. Rows are made by the caller, and filled here.
        non_blocking: whether the copy may go on when this returns.
        clear_cache: whether memory that is not used any more is given back to a device that is no CPU.

    Raises:
        ConfigError: there is no such tensor, its shape is another, or it is on ``meta`` and no value is given.
    """
    owner, name = owner_of(module, tensor_name)
    target = with_index(device)
    old = getattr(owner, name)
    source = old if value is None else value
    pointers = (tensor.data_ptr() for tensor in (source, old)) if tied_params_map else ()
    known = tied_params_map or {}
    ties = next((known[pointer] for pointer in pointers if pointer in known), {})
    if device in ties:
        owner._parameters[name] = cast("nn.Parameter", ties[device])  # noqa: SLF001
        return
    if source.is_meta and target.type != "meta":
        raise ConfigError(f"{tensor_name} is on the meta device, without numbers. Give the value that it is to have.")
    packed = type(old).__name__ in QUANTISED
    if value is not None:
        if old.shape != value.shape and type(old).__name__ != "Params4bit":  # which packs its numbers
            raise ConfigError(
                f"{tensor_name} has the shape {tuple(old.shape)}, and the value {tuple(value.shape)}: they belong to "
                "other models."
            )
        source = value.to(_dtype_for(value, old, dtype, packed=packed), non_blocking=non_blocking)
    elif dtype is not None and target.type == "meta":
        source = old.to("meta").to(_dtype_for(old, old, dtype, packed=packed))
    if source is not old or old.device != target:
        with torch.no_grad():
            made: Any = _made_like(old, source, device, non_blocking=non_blocking)
        (owner._buffers if name in owner._buffers else owner._parameters)[name] = made  # noqa: SLF001
        if fp16_statistics is not None:
            made.SCB = fp16_statistics.to(device, non_blocking=non_blocking)
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()
    ties[device] = getattr(owner, name)


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter or buffer, and what it is called there."""
    path, _, name = tensor_name.rpartition(".")
    owner = functools.reduce(getattr, path.split(".") if path else [], module)
    if owner is None or (name not in owner._parameters and name not in owner._buffers):  # noqa: SLF001
        raise ConfigError(f"{type(module).__name__} has no parameter and no buffer {tensor_name!r}.")
    return owner, name


def _dtype_for(value: Tensor, old: Tensor, dtype: str | torch.dtype | None, *, packed: bool) -> torch.dtype:
    is_real = value.is_floating_point() or value.is_complex()
    if dtype is not None:
        return as_dtype(dtype) if is_real else value.dtype
    # Numbers in 8 or 4 bits mean something together with their scales only.
    return value.dtype if packed and is_real != old.is_floating_point() else old.dtype


def _made_like(old: Tensor, source: Tensor, device: Device, *, non_blocking: bool) -> Tensor:
    """Return a tensor on a device, of the class of the tensor in whose place it comes."""
    kind: Any = type(old)
    if not isinstance(old, nn.Parameter):
        return source.to(device, non_blocking=non_blocking)
    if kind.__name__ in QUANTISED:
        attributes = {name: field for name, field in old.__dict__.items() if name != "_is_hf_initialized"}
        # Numbers that are not quantised yet are when they leave the CPU.
        start = source.cpu() if source.is_floating_point() and not source.is_meta else source
        made = kind(start.detach(), requires_grad=old.requires_grad, **attributes).to(device, non_blocking=non_blocking)
    else:
        moved = source.detach().to(device, non_blocking=non_blocking)
        # Subclasses of tensors, unlike those of parameters, are made a parameter by nn.Parameter.
        make = kind if nn.Parameter in kind.__mro__ else nn.Parameter
        made = make(moved, requires_grad=old.requires_grad)
    if hasattr(old, "_is_hf_initialized"):  # transformers' note
        made._is_hf_initialized = old._is_hf_initialized  # noqa: SLF001
    return cast("Tensor", made)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether weights of a module come from another place when it computes, by its hook."""
    return getattr(getattr(module, "_hf_hook", None), "offload", False) is True


@contextlib.contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Bring the parameters of a module to the device that computes it, for a ``with`` block.

    They are the same `torch.nn.Parameter` objects inside. Of a module without offloaded weights, changes of them count
    afterwards too; parameters of its submodules are left where they are.

    Args:
        module: with a hook that offloads its weights, or any.
        execution_device: by default the hook's; without a hook nothing moves then.

    Raises:
        ConfigError: a parameter is on ``meta``.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    with contextlib.ExitStack() as exits:
        if has_offloaded_params(module):
            if execution_device is not None:
                exits.callback(setattr, hook, "execution_device", hook.execution_device)
                hook.execution_device = execution_device
            exits.callback(hook.post_forward, module, None)  # also if the first part fails
            hook.pre_forward(module)
        if execution_device is not None:
            exits.enter_context(_parameters_on(module, execution_device))
        yield


@contextlib.contextmanager
def _parameters_on(module: nn.Module, device: Device) -> Iterator[None]:
    away = {
        name: (parameter, parameter.data)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.device != with_index(device)
    }
    for name in away:
        if away[name][0].is_meta:
            raise ConfigError(f"{name} is on the meta device, without numbers. Load the weights of the model first.")
    try:
        for parameter, resting in away.values():
            parameter.data = resting.to(device)
        yield
    finally:
        for parameter, resting in away.values():
            now, parameter.data = parameter.data, resting
            if not torch.equal(back := now.to(resting.device), resting):  # pages of a mapped file stay shared
                resting.copy_(back)


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


def with_index(device: Device) -> torch.device:
    """Return a device with its number, which tensors have too; in a rehearsal the CPU, with that number.

    Raises:
        PlacedModelError: this machine has no such device.
    """
    if (rehearsal := context.rehearsal()) is not None:
        return torch.device(rehearsal.on_cpu(device))
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:  # the second by a torch without CUDA
        raise PlacedModelError(
            f"This process sees no device {device!r}: {str(error).splitlines()[0].rstrip('.')}. Name another one, "
            "'cpu' or 'disk', or write device_map='auto'."
        ) from error


def is_cpu(device: Device | None) -> bool:
    """Return whether a device is the CPU, and stands for no other; True for none, where nothing moves."""
    return device is None or with_index(device) == torch.device("cpu")


def move_tensor(module: nn.Module, name: str, device: torch.device, values: Mapping[str, Tensor] | None = None) -> None:
    """Move a tensor of a module to a device; one on ``meta`` gets its value. A parameter stays the same object else."""
    tensor = tensor_at(module, name)
    if type(tensor) is not nn.Parameter or tensor.is_meta:
        value = values[name] if tensor.is_meta and values and name in values else None
        set_module_tensor_to_device(module, name, device, value=value, clear_cache=False)
    elif tensor.device != device:
        tensor.data = tensor.data.to(device)


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name, which may have dots."""
    owner, attribute = owner_of(module, name)
    tensor: Tensor = getattr(owner, attribute)
    return tensor


def tensor_names(module: nn.Module, *, recurse: bool = True) -> list[str]:
    """Return the names of all parameters and buffers, tied ones by each of their names."""
    parameters = module.named_parameters(recurse=recurse, remove_duplicate=False)
    buffers = module.named_buffers(recurse=recurse, remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def moved(data: Any, device: torch.device) -> Any:
    """Return data with its tensors on a device; the same object if they are there, as a cache that the module fills."""
    if type(data) is Tensor:
        return data.to(device)
    if data is None or type(data) is bool:  # most of what a block is called with
        return data
    return data if is_on(data, device) else send_to_device(data, device)
