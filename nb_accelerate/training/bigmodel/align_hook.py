"""The hook of a block: its inputs, and its weights where they rest elsewhere, come to the device that it computes on.

::

    inputs --> pre_forward: moved; weights arrive --> forward --> post_forward: weights leave; outputs moved back
                              ^ Schedule.before                     ^ Schedule.after, after an exception too
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from nb_accelerate.errors import ConfigError, PlacedModelError
from nb_accelerate.training.bigmodel.hooks import ModelHook
from nb_accelerate.training.bigmodel.mapped import files_of
from nb_accelerate.training.bigmodel.placement import Mapped, Staged, put_at_rest
from nb_accelerate.training.bigmodel.schedule import Schedule
from nb_accelerate.training.bigmodel.tensors import (
    QUANTISED,
    move_tensor,
    moved,
    owner_of,
    tensor_at,
    tensor_names,
    with_index,
)
from nb_accelerate.training.pytree import map_tensors, tensors_in
from nb_accelerate.training.pytree.structures import find_device, send_to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from nb_accelerate.training.bigmodel.placement import Placement

    Device = int | str | torch.device


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


class RestingWeights(dict[str, Tensor]):
    """The weights of a block where they rest, by their names in it. A hook for another module does not take them."""


class AlignDevicesHook(ModelHook):
    """Bring what a module needs to the device that it computes on.

    Args:
        execution_device: where inputs, and weights, are when the module computes. None moves nothing.
        offload: whether weights rest elsewhere: in host memory, or in files that they are views of. They stay
            parameters of the module at rest, with their numbers; none is on ``meta``.
        io_same_device: return outputs on the device of the first tensor of the inputs.
        weights_map: what weights are, by their names in the module. By default what they are now. Set to the resting
            weights when the hook is added.
        offload_buffers: buffers that a state dict has rest elsewhere too. All others stay on ``execution_device``.
        place_submodules: the hook cares for the weights of all modules in the module, not only for its own.
        skip_keys: keyword arguments, and keys of outputs, that are not moved.
        tied_params_map: accepted. One tensor under several names is one on a device too.

    Attributes:
        original_devices: where the weights of a module with ``offload`` were before, by name.
        names: of the module's tensors that the hook cares for. Set before it is added; else by ``place_submodules``.
        schedule: fetches the weights of the next block while this one computes. Set likewise; else one of its own.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.original_devices: dict[str, torch.device] = {}
        self.names: list[str] | None = None
        self.schedule: Schedule | None = None
        self._placements: dict[torch.device, tuple[Schedule, Placement]] = {}
        self._numbered: tuple[Device, torch.device] | None = None
        self._input_devices: dict[int, torch.device | None] = {}  # by thread
        self._of_state_dict: RemovableHandle | None = None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __getstate__(self) -> dict[str, Any]:
        # The weights of a copy are those of the copied module.
        weights = None if self._placements else self.weights_map
        return {**self.__dict__, "weights_map": weights, "_placements": {}, "_input_devices": {}}

    @property
    def device(self) -> torch.device | None:
        """The execution device, with its number."""
        given = self.execution_device
        if given is None:
            return None
        if self._numbered is None or self._numbered[0] is not given:
            self._numbered = given, with_index(given)
        return self._numbered[1]

    @property
    @override
    def under_compiler(self) -> Literal["traced", "left out", "run"]:
        # Weights that are mapped are right at rest, and nothing has to come to the CPU.
        return "left out" if self._is_on_cpu else "run"

    @property
    def _is_on_cpu(self) -> bool:
        device = self.device
        return device is None or device.type == "cpu"

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        if (device := self.device) is None:  # read here, so that a compiler need not trace how it is found
            return module
        names = self.names if self.names is not None else tensor_names(module, recurse=self.place_submodules)
        visiting = [name for name in names if self.offload and self.visits(module, name)]
        if self.offload:
            for name in names:
                self.original_devices.setdefault(name, tensor_at(module, name).device)
        for name in set(names).difference(visiting):
            move_tensor(module, name, device, self.weights_map)
        if self.offload:
            self._place(module, visiting)
            self._of_state_dict = module.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
        return module

    def _before_state_dict(self, _module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        for _, placement in () if keep_vars else self._placements.values():  # else for the names, or to load others
            placement.check()

    def visits(self, module: nn.Module, name: str) -> bool:
        """Return whether a tensor of a module with ``offload`` rests elsewhere: not so buffers, by default."""
        owner, attribute = owner_of(module, name)
        is_saved = attribute not in owner._non_persistent_buffers_set  # noqa: SLF001 - there is no public way to ask
        return attribute in owner._parameters or (self.offload_buffers and is_saved)  # noqa: SLF001

    def _place(self, module: nn.Module, names: Iterable[str]) -> tuple[Schedule, Placement]:
        device = self.device or torch.device("cpu")
        resting = self._resting(module, names)
        tensors = [tensor for _, _, tensor in resting]
        files = next((found for tensor in tensors if (found := files_of(tensor)) is not None), None)
        placement = (Mapped if device.type == "cpu" else Staged)(
            resting,
            device,
            files=files,
            names=[files.name_of(tensor) for tensor in tensors if files and files_of(tensor) is files],
        )
        if self.schedule is None or self.schedule.device != device:
            self.schedule = Schedule(device)
        self.schedule.add(placement)
        self._placements[device] = self.schedule, placement
        return self._placements[device]

    def _resting(self, module: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, str, Tensor]]:
        """Return what weights are at rest, with their owners, and show it in ``weights_map``."""
        given = {} if self.weights_map is None or isinstance(self.weights_map, RestingWeights) else self.weights_map
        device = self.device or torch.device("cpu")
        self.weights_map = RestingWeights({name: _resting(module, name, given, device) for name in names})
        return [(*owner_of(module, name), tensor) for name, tensor in self.weights_map.items()]

    def _placed(self, module: nn.Module) -> tuple[Schedule, Placement]:
        """Return the placement: a new one in a copy of the module, and if others have changed the execution device."""
        placed = self._placements.get(self.device or torch.device("cpu"))
        if placed is not None:
            return placed
        names = self.names if self.names is not None else tensor_names(module, recurse=self.place_submodules)
        return self._place(module, [name for name in names if self.visits(module, name)])

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self._input_devices[threading.get_ident()] = find_device([args, kwargs])
        if (device := self.device) is not None:
            args = tuple([moved(arg, device) for arg in args])
            kwargs = {key: value if self._stays(key) else moved(value, device) for key, value in kwargs.items()}
        if self.offload:
            schedule, placement = self._placed(module)
            if not self._is_on_cpu:
                # Let weights visit too that the block was given since, as those of LoRA.
                known = set(placement.slots)
                for owner in module.modules() if self.place_submodules else (module,):
                    for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):  # noqa: SLF001
                        if tensor is not None and tensor.device != placement.device and (owner, name) not in known:
                            placement.slots.append((owner, name))
            schedule.before(placement)
        return args, kwargs

    def _stays(self, key: str) -> bool:
        return self.skip_keys is not None and (key == self.skip_keys or key in self.skip_keys)

    @override
    def compute(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self.offload or self._is_on_cpu or not torch.is_grad_enabled():
            return super().compute(module, forward, args, kwargs)
        needs = any(tensor.requires_grad for tensor in [*tensors_in([args, kwargs]), *module.parameters()])
        with torch.no_grad():
            output = forward(*args, **kwargs)
        return map_tensors(refuse_backward(type(module).__name__, self.device), output) if needs else output

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.forward_failed(module)
        device = self._input_devices.pop(threading.get_ident(), None) if self.io_same_device else None
        return output if device is None else send_to_device(output, device, skip_keys=self.skip_keys)

    @override
    def forward_failed(self, module: nn.Module) -> None:
        if not self.offload or not self._placements:
            return
        schedule, placement = self._placed(module)
        schedule.after(placement)
        if not isinstance(self.weights_map, RestingWeights):  # by who has changed weights: peft merges adapters so
            put_at_rest(self._resting(module, list(self.weights_map or ())))

    @override
    def detach_hook(self, module: nn.Module) -> nn.Module:
        for name, device in self.original_devices.items() if self.offload else ():
            if device.type != "meta":
                move_tensor(module, name, device)
        self._placements.clear()
        if self._of_state_dict is not None:
            self._of_state_dict.remove()
        return module


def _resting(module: nn.Module, name: str, given: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return what a weight is at rest: what was given for it, else what it is now, in host memory."""
    tensor = tensor_at(module, name)
    if device.type != "cpu" and type(tensor).__name__ in QUANTISED:
        raise ConfigError(
            f"{name} of a {type(module).__name__} is quantised by bitsandbytes, and its scales cannot visit {device}. "
            "Give the module a GPU of its own in device_map, or leave it as it is: BnbQuantizationConfig(skip_modules)."
        )
    if name not in given and tensor.is_meta:
        raise ConfigError(
            f"{name} of a {type(module).__name__} has no numbers: it is on the meta device, and neither a state dict "
            "nor a file that was given has it. Load the checkpoint first, or give the folder that has all weights."
        )
    value = given.get(name, tensor)
    if value.shape != tensor.shape:
        raise ConfigError(
            f"{name} of a {type(module).__name__} has the shape {tuple(tensor.shape)}, and the given weight "
            f"{tuple(value.shape)}: they belong to different models."
        )
    return value.detach().to("cpu", tensor.dtype)
