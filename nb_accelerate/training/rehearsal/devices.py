"""The CPU in the place of accelerators: what code asks of ``cuda:1``, and of their memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import override

from nb_accelerate.base.devices import DEVICE_KINDS, find_kind
from nb_accelerate.training.process.live_bytes import FusedAttention, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

_CPU = torch.device("cpu")
_DEVICE = Tensor.device.__get__


def on_cpu(device: Any) -> Any:
    """Return ``cpu:1`` for ``cuda:1`` and for 1, and ``cpu`` for ``cuda``, the rank's own; another value as it is."""
    # For torch both are the CPU; the number says which device of a run it stands for.
    if type(device) is int:
        return torch.device("cpu", device)
    name, _, number = str(device).partition(":") if isinstance(device, (str, torch.device)) else ("", "", "")
    kind = find_kind(name)
    return device if kind is None or kind.is_host else torch.device(f"cpu:{number}" if number else "cpu")


class OnCpu(FusedAttention):
    """Has functions of torch use the CPU where they are told an accelerator.

    Args:
        own: number of the rank's own device, which ``cpu`` is.
        device_of: returns the number of the device that a tensor is on, or None.
    """

    def __init__(self, own: int, device_of: Callable[[Tensor], int | None]) -> None:
        super().__init__()
        self._own = own
        self._device_of = device_of
        self._moves = [getattr(Tensor, kind.name, None) for kind in DEVICE_KINDS if not kind.is_host]

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return self._here(args[0] if args and type(args[0]) is int else func(*args, **kwargs))
        if func == _DEVICE:
            return self._place(args[0])
        if func in self._moves:  # such as `Tensor.cuda`
            number = args[1] if len(args) > 1 else kwargs.get("device")
            func, args, kwargs = Tensor.to, (args[0], _CPU if number is None else number), {}
        if func is torch._C._nn._parse_to:  # noqa: SLF001 - what modules read their device with
            args = tuple(map(self._here, args))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._here(kwargs["device"])}
        if func is Tensor.to:
            return self._moved(args[0], *map(self._here, args[1:]), **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def _here(self, device: Any) -> Any:
        device = on_cpu(device)
        return _CPU if device == torch.device("cpu", self._own) else device

    def _moved(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            args = (self._place(args[0]), args[0].dtype, *args[1:])
        before = self._device_of(tensor)
        if before is None or not any(isinstance(each, (str, torch.device)) for each in (*args, kwargs.get("device"))):
            return tensor.to(*args, **kwargs)
        copy = kwargs.pop("copy", False)
        destination = [each for each in args if not isinstance(each, bool)]
        device, dtype, *_ = torch._C._nn._parse_to(*destination, **kwargs)  # noqa: SLF001 - as torch reads these arguments
        after = self._own if device == _CPU else device.index
        others = {"dtype": tensor.dtype if dtype is None else dtype, "copy": copy}
        if after == before:  # which torch, that knows one CPU, would copy
            return tensor.to(**others)
        moved = tensor.to(torch.device("cpu", after), **others)
        if moved.requires_grad:  # its gradient would stay where it is, as torch knows one CPU
            moved.register_hook(lambda gradient: gradient.to(torch.device("cpu", before)))  # type: ignore[no-untyped-call]
        return moved

    def _place(self, tensor: Tensor) -> torch.device:
        number = self._device_of(tensor)
        return tensor.device if number in (None, self._own) else torch.device("cpu", number)


def of_subclasses(has_torch_function: Callable[..., bool]) -> Callable[..., bool]:
    """Return a check that leaves modes out, for `torch.nn.functional`."""
    # Under a mode its functions look themselves up by name, and call what users have put there a second time.

    def has(*given: Any) -> bool:
        known = (Tensor, Parameter)
        return any(type(each) not in known for each in tensors_in(given)) and has_torch_function(*given)

    return has


def kept_on_cpu(storage: Any, location: str) -> Any:
    """Return what `torch.load` has read for an accelerator, which stays where it is; None for other places."""
    return storage if on_cpu(location) != location or location.startswith("cpu:") else None


def answers(device: str, capacity: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Return functions in the place of those of `torch.cuda` that fail without a GPU, or say what it has room for.

    Args:
        device: name of the accelerator.
        capacity: its bytes; 0 if they are not known.
        note: called for each that asks for memory.
    """
    held = dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), 0)
    properties = SimpleNamespace(name=device, total_memory=capacity)
    of_memory = {"mem_get_info": (capacity, capacity), "get_device_properties": properties, **held}
    others = {"set_device": None, "synchronize": None, "reset_peak_memory_stats": None, "current_device": 0}

    def answered(name: str, value: Any) -> Callable[..., Any]:
        def answer(*_: Any, **__: Any) -> Any:
            if name in of_memory:
                note(f"torch.cuda.{name} has no device to ask: what depends on it may differ in a run")
            return value

        return answer

    return {name: answered(name, value) for name, value in {**of_memory, **others}.items()}
