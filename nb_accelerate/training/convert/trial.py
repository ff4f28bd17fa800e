"""Find out by trying whether a model computes rows one by one, so that its calls can be cut into parts.

It is called with some rows and with parts of them, once, and the results are compared. A graph network, attention over
a batch, or a time dimension that comes first give other results in parts.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from nb_accelerate.training.convert.rows import Cut, narrowed
from nb_accelerate.training.data.plan.split import bounds
from nb_accelerate.training.process import rng
from nb_accelerate.training.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.convert.rows import Join

# Relative to the largest value; 4e-3 for others, TensorFloat-32 among them.
_TOLERANCE = {torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 6e-2}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")

_ROWS = 8  # that are tried for each rank, at most: a whole batch may need more memory than one rank has


def find_cut(model: nn.Module, arguments: Any, ranks: int, kind: DeviceKind) -> tuple[Cut | None, str]:
    """Return how a call of a model can be cut, or None and the reason why it cannot. The model stays as it is."""
    inputs = tensors_in(arguments)
    sizes = list(inputs[0].shape[:2]) if inputs else []
    why = f"it was not called with tensors of {ranks} rows or more"
    if has_hooks(model):
        return None, "its hooks would see a part of the rows"
    for rows in dict.fromkeys(size for size in sizes if size >= ranks):
        dims = [next((dim for dim, size in enumerate(tensor.shape) if size == rows), None) for tensor in inputs]
        reason = "parts of its rows do not give what all of them give together"
        joins: list[Join | None] = [None]
        left = [tensor for tensor, dim in zip(inputs, dims, strict=True) if dim is None and tensor.dim()]
        # Numbers of rows (of a graph's nodes, say) would point outside of a part, which ends the runtime of a GPU.
        if all(tensor.is_floating_point() for tensor in left):
            try:
                joins = _try(model, narrowed(arguments, dims, 0, min(rows, _ROWS * ranks + 1)), dims, ranks, kind)
            except Exception as error:  # whatever users' code makes of fewer rows
                reason = f"fewer of its rows give an error ({type(error).__name__})"
        found = tuple(join for join in joins if join is not None)
        if found and len(found) == len(joins):
            return Cut(tuple(dims), found), ""
        why = reason if rows == sizes[0] else why  # the second dimension is rarely one of rows
    return None, why


def has_hooks(model: nn.Module) -> bool:
    """Return whether users' hooks on a model, or on its parameters, are called."""
    of_modules = (hook for part in model.modules() for name in _HOOKS for hook in vars(part)[name].values())
    of_parameters = (getattr(parameter, name) for parameter in model.parameters() for name in _OF_GRADIENTS)
    return any(not hook.__module__.startswith("torch.") for hook in of_modules) or any(of_parameters)


def _kept(model: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of a model that are no parameters and buffers of it."""
    own = ("_parameters", "_buffers", "_modules")
    return [
        tensor
        for part in model.modules()
        for tensor in tensors_in({name: value for name, value in vars(part).items() if name not in own})
    ]


def _try(
    model: nn.Module, arguments: Any, dims: Sequence[int | None], ranks: int, kind: DeviceKind
) -> list[Join | None]:
    """Return how the results of parts are joined; None for one that cannot be."""
    rows = max(tensor.shape[dim] for tensor, dim in zip(tensors_in(arguments), dims, strict=True) if dim is not None)
    ends = [bounds(rows, rank, ranks) for rank in range(ranks)]
    states = rng.capture(kind, all_devices=False)
    # torch copies only what was not computed.
    model = copy.deepcopy(model, {id(tensor): tensor.detach() for tensor in _kept(model) if tensor.grad_fn is not None})
    attributes, before = [(part, dict(vars(part))) for part in model.modules()], _kept(model)
    results = []
    with torch.no_grad(), _NoChance():  # type: ignore[no-untyped-call]
        for first, end in ((0, rows), (0, rows), *ends):
            args, kwargs = narrowed(arguments, dims, first, end)
            given = tensors_in(model(*args, **kwargs))
            left = [tensor for tensor in _kept(model) if all(tensor is not old for old in before)]
            results.append([tensor.clone() for tensor in (*given, *left)])
            rng.restore(states, kind)
            for part, own in attributes:
                vars(part).clear()
                vars(part).update(own)
            model.eval()  # from the second call on, as batch norm uses all rows in training
    in_training, *results = results
    forms = [[(tensor.dim(), tensor.dtype) for tensor in result] for result in (in_training, results[0])]
    if forms[0] != forms[1]:
        return [None]
    weights = [(end - first) / rows for first, end in ends]
    each = list(zip(*results, strict=True))
    # What a call leaves in the model (a loss, a state) is not joined, so it has to be the same for all rows.
    if not all(_close(part, whole) for whole, *parts in each[len(given) :] for part in parts):
        return [None]
    return [_join(whole, parts, weights) for whole, *parts in each[: len(given)]]


def _join(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> Join | None:
    """Return how parts make the whole; None if they do not."""
    if any(part.shape != whole.shape for part in parts):
        for dim in range(whole.dim()):
            with contextlib.suppress(RuntimeError):  # of other shapes
                if _close(torch.cat(list(parts), dim), whole):
                    return dim
        return None
    # A number that is equal in all parts is its mean too, also for gradients.
    if whole.is_floating_point() and _close(sum(p * weight for p, weight in zip(parts, weights, strict=True)), whole):
        return "mean"
    return "same" if all(_close(part, whole) for part in parts) else "sum" if _close(sum(parts), whole) else None


def _close(found: Any, wanted: Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(found, wanted)
    largest = torch.nan_to_num(wanted).abs().max().item()
    return torch.allclose(found, wanted, rtol=0.0, atol=_TOLERANCE.get(wanted.dtype, 4e-3) * largest, equal_nan=True)


class _NoChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random numbers zero, so that they do not differ between all rows and parts."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            map_tensors(lambda tensor: tensor.zero_(), result)
        return result
