"""`SharedModels`: calls of models in which each rank computes a part of the rows, and all get the whole."""

from __future__ import annotations

import sys
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from nb_accelerate.errors import ConfigError
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.training.comm import operations
from nb_accelerate.training.convert.trial import find_cut, has_hooks
from nb_accelerate.training.pytree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.convert.rows import Cut
    from nb_accelerate.training.process.context import ProcessContext


class SharedModels:
    """Calls models, and knows of each how its calls are cut."""

    def __init__(self, process: ProcessContext, collectives: Collectives) -> None:
        self._kind, self._device, self._collectives = process.kind, process.device, collectives
        # In the order of their first calls, which is the same on all ranks.
        self.called = weakref.WeakKeyDictionary[nn.Module, dict[Any, tuple["Cut | None", str]]]()
        self._num_calls, self._num_hooks = 0, RemovableHandle.next_id
        self.unshared: dict[int, tuple[str, int, str]] = {}  # class, line and reason, by the model's id

    @property
    def cut(self) -> list[nn.Module]:
        """The models of which calls were cut, in the same order on all ranks."""
        return [model for model, calls in self.called.items() if any(cut for cut, _ in calls.values())]

    def is_of_another_rank(self, device: torch.device) -> bool:
        """Whether a device is a GPU that this rank does not use."""
        return device.type == self._device.type and device.index not in (None, self._device.index)

    def call(self, model: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a call of a model gives in one process; `plain` is torch's call of a module."""
        arguments = args, kwargs
        tensors = tensors_in(arguments)
        cut, why = self._find(model, arguments)
        rows, ranks = cut.rows(tensors) if cut is not None else {0}, self._collectives.world_size
        norms = [module for module in model.modules() if isinstance(module, _NormBase)] if model.training else []
        # Batch norm cannot be trained with one row.
        if cut is None or len(rows) > 1 or min(rows) < ranks * (2 if norms else 1):
            if any(arguments) and torch.is_grad_enabled() and model not in self.cut:
                self.unshared.setdefault(id(model), (type(model).__name__, line_here(), why))
            return plain(model, *args, **kwargs)
        self.unshared.pop(id(model), None)
        args, kwargs = cut.own_part(arguments, self._collectives)
        self._num_calls += 1
        devices = [] if self._device.index is None else [self._device.index]
        with torch.random.fork_rng(devices, device_type=self._kind.name):
            # Rows of this rank are dropped unlike those of others. Outside, all ranks have equal random numbers.
            torch.manual_seed(torch.initial_seed() + self._num_calls * ranks + self._collectives.rank)
            part = plain(model, *args, **kwargs)
        # What batch norm has seen is averaged over ranks. By .data: backward needs no value, and refuses changed ones.
        kept = [value.data for norm in norms for value in norm.buffers(recurse=False) if value.is_floating_point()]
        for value, mean in zip(kept, operations.reduce(self._collectives, kept, "mean") if kept else (), strict=True):
            value.copy_(mean)
        return cut.joined(part, rows.pop(), self._collectives)

    def _find(self, model: nn.Module, arguments: Any) -> tuple[Cut | None, str]:
        """Return how a call is cut, which is tried once for calls that are alike but for the number of rows."""
        tensors, ranks = tensors_in(arguments), self._collectives.world_size
        args, kwargs = arguments
        key = (
            RemovableHandle.next_id != self._num_hooks and has_hooks(model),
            *(size >= ranks for tensor in tensors[:1] for size in tensor.shape[:2]),
            *((tensor.dim(), tensor.dtype) for tensor in tensors),
            *map(type, args),
            *kwargs,
            *(value for value in (*args, *kwargs.values()) if isinstance(value, (bool, str, type(None)))),
        )
        known = self.called.setdefault(model, {})
        if key not in known:
            self._check(model)
            found = find_cut(model, arguments, ranks, self._kind)
            sums = [repr(tensor.detach().double().sum().item()) for tensor in tensors]
            of_ranks = self._collectives.all_gather_object((found, sums))
            if any(other != sums for _, other in of_ranks):
                raise ConfigError(
                    f"line {line_here()}: ranks call this {type(model).__name__} with different rows. With --convert "
                    "all ranks read the same, and each computes its part: leave out prepared loaders, samplers for "
                    "several processes, and seeds by time or process"
                )
            known[key] = next((other for other, _ in of_ranks if other[0] is None), found)
            if known[key][0] is not None:  # models may differ between ranks after an earlier cell
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data.copy_(self._collectives.broadcast(tensor.detach().clone(), 0))
        return known[key]

    def _check(self, model: nn.Module) -> None:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            raise ConfigError(
                f"line {line_here()}: the model is in {type(model).__name__}, which shares out rows itself (a "
                "Trainer does that). Run the cell without --convert, or leave it out"
            )
        device = next(model.parameters()).device
        if self.is_of_another_rank(device):
            raise ConfigError(
                f"line {line_here()}: this {type(model).__name__} is on {device}, and the device of rank "
                f"{self._collectives.rank} is {self._device}. Write {device.type!r} without a number, or device"
            )

    def backward(self, plain: Callable[[], None]) -> None:
        """Run backward, and average what it adds to the gradients of models that were cut.

        Gradients of earlier backwards, of accumulated batches say, are equal on all ranks, and stay so.
        """
        models = self.cut
        parameters = {id(weight): weight for model in models for weight in model.parameters() if weight.requires_grad}
        before = {key: _version(weight.grad) for key, weight in parameters.items()}
        plain()
        for model in models:
            # One that is in two models is averaged with the first.
            own = [parameters.pop(id(weight)) for weight in model.parameters() if id(weight) in parameters]
            if any(_version(weight.grad) != before[id(weight)] for weight in own):
                self._average(own)

    def _average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Put the mean over ranks in the place of gradients; one that no rank has stays None."""
        lacks = any(weight.grad is None for weight in parameters)
        mine = [torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense() for weight in parameters]
        has = torch.tensor([float(weight.grad is not None) for weight in parameters], device=mine[0].device)
        *means, has = operations.reduce(self._collectives, [*mine, has], "mean")
        used = has.tolist() if lacks else [1.0] * len(parameters)
        for weight, mean, ranks in zip(parameters, means, used, strict=True):
            is_sparse = weight.grad is not None and weight.grad.is_sparse
            weight.grad = None if not ranks else mean.to_sparse(1) if is_sparse else mean

    def refuse_parameters(self, inputs: Any) -> None:
        """Refuse `torch.autograd.grad` of parameters, which does not average; gradients of inputs are whole."""
        parameters = {id(weight) for model in self.cut for weight in model.parameters()}
        if any(id(weight) in parameters for weight in inputs):
            raise ConfigError(
                f"line {line_here()}: with --convert, autograd.grad does not give the gradients of parameters. Write "
                "loss.backward(), or run this cell in the notebook"
            )


def line_here() -> int:
    """Return the line of users' code that runs; 0 if there is none."""
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - as `warnings` does
    return next((frame.f_lineno for frame, _ in stack if is_users(frame.f_code.co_filename)), 0)


def _version(gradient: Tensor | None) -> tuple[int, int]:
    # An old one is alive until the new one takes its place, so their numbers differ.
    return (0, 0) if gradient is None else (id(gradient), gradient._version)  # noqa: SLF001 - counts changes in place
