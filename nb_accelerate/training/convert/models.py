"""`SharedModels`: calls of models in which each rank computes a part of the rows, and all get the whole."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm import operations
from nb_accelerate.training.convert.order import line_here
from nb_accelerate.training.convert.rows import PartsDiffer
from nb_accelerate.training.convert.trial import Trial, find_cut, has_hooks
from nb_accelerate.training.pytree import tensors_in
from nb_accelerate.training.strategies.averaging import average

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.convert.order import Order
    from nb_accelerate.training.process.context import ProcessContext


@dataclass
class _Calls:
    """Calls of a model that are alike: how many there were, and what is known of them."""

    number: int = 0
    trial: Trial = field(default_factory=lambda: Trial(None, is_decided=False))


class SharedModels:
    """Calls models, and knows of each how its calls are cut.

    Attributes:
        called: models in the order of their first calls, which is the same on all ranks; of each, its kinds of calls.
        unshared: class, line and reason of each model whose work is not shared, by its id.
        rules: class, line, and what is not as in one process, likewise.
    """

    def __init__(
        self, process: ProcessContext, collectives: Collectives, order: Order, variables: dict[str, Any]
    ) -> None:
        self._kind, self._device, self._collectives = process.kind, process.device, collectives
        self._order, self._variables = order, variables
        self.called = weakref.WeakKeyDictionary[nn.Module, dict[Any, _Calls]]()
        self._trained = weakref.WeakSet[nn.Module]()  # in parts
        self._num_calls, self._num_hooks = 0, RemovableHandle.next_id
        self._lines_of_backward = set[int]()
        self.unshared: dict[int, tuple[str, int, str]] = {}
        self.rules: dict[int, tuple[str, int, str]] = {}

    @property
    def cut(self) -> list[nn.Module]:
        """The models whose calls were cut, in the same order on all ranks."""
        return [model for model, kinds in self.called.items() if any(calls.trial.cut for calls in kinds.values())]

    def is_of_another_rank(self, device: torch.device) -> bool:
        """Whether a device is a GPU that this rank does not use."""
        return device.type == self._device.type and device.index not in (None, self._device.index)

    def call(self, model: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a call of a model gives in one process; `plain` is torch's call of a module."""
        arguments = args, kwargs
        if any(map(is_lazy, model.parameters())):  # it gets its parameters from the first call
            return plain(model, *args, **kwargs)
        tensors = tensors_in(arguments)
        calls = self._find(model, arguments)
        cut, is_trained = calls.trial.cut, torch.is_grad_enabled()
        rows, ranks = cut.rows(tensors) if cut is not None else {0}, self._collectives.world_size
        norms = [module for module in model.modules() if isinstance(module, _NormBase) and module.training]
        # Batch norm cannot be trained with one row.
        if cut is None or len(rows) > 1 or min(rows) < ranks * (2 if norms else 1):
            if any(arguments) and is_trained and model not in self._trained:
                why = calls.trial.why or f"{min(rows)} rows are too few for {ranks} ranks"
                self.unshared.setdefault(id(model), (type(model).__name__, line_here(), why))
            return plain(model, *args, **kwargs)
        self._order.meet(f"a call of {type(model).__name__}", tensors)
        if is_trained:
            self._trained.add(model)
            self.unshared.pop(id(model), None)
        rules = ["batch norm uses the rows of its rank"] if norms else []
        if calls.trial.draws:
            rules.append("each rank draws random numbers (of dropout, say) for its own rows")
        if rules and id(model) not in self.rules:
            text = f"{' and '.join(rules)}, so losses are near those of one process, and not equal"
            self.rules[id(model)] = type(model).__name__, line_here(), text
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
        try:
            return cut.joined(part, rows.pop(), self._collectives)
        except PartsDiffer:
            calls.trial = Trial(None, "an output was equal for all rows, and is not any more")
            return self.call(model, plain, *arguments)

    def _find(self, model: nn.Module, arguments: Any) -> _Calls:
        """Return how a call is cut, which is tried once for calls that are alike but for the number of rows."""
        tensors, ranks = tensors_in(arguments), self._collectives.world_size
        args, kwargs = arguments
        key = (
            RemovableHandle.next_id != self._num_hooks and has_hooks(model),
            torch.is_grad_enabled(),
            *(weight.requires_grad for weight in model.parameters()),
            *(choice for part in model.modules() for choice in _choices(part)),
            *(size >= ranks for tensor in tensors[:1] for size in tensor.shape[:2]),
            *((tensor.dim(), tensor.dtype) for tensor in tensors),
            *map(type, args),
            *kwargs,
            *(value for value in (*args, *kwargs.values()) if isinstance(value, (bool, str, type(None)))),
        )
        calls_of_model = self.called.setdefault(model, {})
        if key not in calls_of_model:
            calls_of_model[key] = _Calls()
        calls = calls_of_model[key]
        calls.number += 1
        # What could not be decided is tried again at calls 2, 4, 8 ...
        if not calls.trial.is_decided and calls.number & (calls.number - 1) == 0:
            self._check(model)
            self._order.meet(f"a call of {type(model).__name__}", tensors)
            trial = find_cut(model, arguments, ranks, self._kind, self._variables)
            of_ranks = self._collectives.all_gather_object(trial)
            calls.trial = next((other for other in of_ranks if other.cut is None), trial)
            if calls.trial.cut is not None:  # models may differ between ranks after an earlier cell
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data.copy_(self._collectives.broadcast(tensor.detach().clone(), 0))
        return calls

    def _check(self, model: nn.Module) -> None:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            refuse_wrapper(model)
        device = next(model.parameters()).device
        if self.is_of_another_rank(device):
            raise ConfigError(
                f"line {line_here()}: this {type(model).__name__} is on {device}, and the device of rank "
                f"{self._collectives.rank} is {self._device}. Write {device.type!r} without a number, or device"
            )

    def backward(self, losses: Sequence[Tensor], plain: Callable[[], None]) -> None:
        """Run backward, and average what it adds to the gradients of models that were cut."""
        # Gradients of earlier backwards, of accumulated batches say, are equal on all ranks, and stay so.
        line = line_here()
        if line not in self._lines_of_backward:
            self._lines_of_backward.add(line)
            weights = {id(weight) for model in self.called for weight in model.parameters()}
            leaves = _leaves_of(losses)
            if leaves and not leaves & weights:
                self.unshared[-line] = "the loss", line, "no parameter of an nn.Module that was called is in it"
        models = self.cut
        parameters = {id(weight): weight for model in models for weight in model.parameters() if weight.requires_grad}
        before = {key: _version(weight.grad) for key, weight in parameters.items()}
        plain()
        for model in models:
            # One that is in two models is averaged with the first.
            of_model = [parameters.pop(id(weight)) for weight in model.parameters() if id(weight) in parameters]
            if any(_version(weight.grad) != before[id(weight)] for weight in of_model):
                average(self._collectives, of_model)

    def refuse_parameters(self, inputs: Any) -> None:
        """Refuse `torch.autograd.grad` of parameters, which does not average; gradients of inputs are whole."""
        parameters = {id(weight) for model in self.cut for weight in model.parameters()}
        if any(id(weight) in parameters for weight in inputs):
            raise ConfigError(
                f"line {line_here()}: with --convert, autograd.grad does not give the gradients of parameters. Write "
                "loss.backward(), or run this cell in the notebook"
            )


def _version(gradient: Tensor | None) -> tuple[int, int]:
    # An old one is alive until the new one takes its place, so their numbers differ.
    return (0, 0) if gradient is None else (id(gradient), gradient._version)  # noqa: SLF001 - counts changes in place


def _choices(module: nn.Module) -> list[bool | str | None]:
    """Return what may choose between ways through a layer."""
    if type(module).__module__.startswith("torch."):
        return [module.training]
    return [value for value in vars(module).values() if value is None or value.__class__ in (bool, str)]


def _leaves_of(losses: Sequence[Tensor]) -> set[int]:
    """Return the ids of tensors that get a gradient by backward."""
    pending: list[Any] = [loss.grad_fn for loss in losses]
    seen, leaves = set[Any](), set[int]()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            leaves |= {id(node.variable)} if hasattr(node, "variable") else set()
    return leaves


def refuse_wrapper(model: nn.Module, *_: object, **__: object) -> NoReturn:
    """Refuse a wrapper that shares out rows: its exchanges would meet those of a converted cell."""
    raise ConfigError(
        f"line {line_here()}: the model is in {type(model).__name__}, which shares out rows itself (a Trainer does "
        "that). Run the cell without --convert, or leave it out"
    )
