"""Find out by trying whether a model computes rows one by one, so that its calls can be cut into parts.

The call is made as it will be, in training mode and with gradients if these are on, with some rows and with two parts
of them. Results, gradients, and what the calls leave in buffers and attributes are compared. A graph network, attention
over a batch, or a time dimension that comes first give other results in parts.

::

    a few rows --> fresh copy of the model --> results, gradients, state ---+
    first part --> fresh copy              --> results, gradients, state ---+--> how results are joined, or why not
    the others --> fresh copy              --> results, gradients, state ---+
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from nb_accelerate.training.convert.rows import Cut, narrowed
from nb_accelerate.training.data.plan.plan import bounds
from nb_accelerate.training.process import rng
from nb_accelerate.training.pytree import children_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.convert.rows import Join

# Relative to the largest value; 4e-3 for others, TensorFloat-32 among them.
_TOLERANCE = {torch.float64: 1e-6, torch.float16: 3e-2, torch.bfloat16: 6e-2}

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_TORCH = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"}

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_ROWS = 17  # that are tried at most: a whole batch may need more memory than one rank has


@dataclass(frozen=True)
class Trial:
    """What a trial has found."""

    cut: Cut | None  # how calls are cut; None if they cannot be, or it is not known yet
    why: str = ""  # they are not cut
    is_decided: bool = True  # no other trial, with other numbers, may find a cut
    draws: bool = False  # random numbers, as by dropout


def find_cut(model: nn.Module, arguments: Any, ranks: int, kind: DeviceKind, variables: dict[str, Any]) -> Trial:
    """Return how a call of a model can be cut, or why it cannot. The model stays as it is, and so do variables."""
    inputs = tensors_in(arguments)
    sizes = list(inputs[0].shape[:2]) if inputs else []
    if has_hooks(model):
        return Trial(None, "its hooks would see a part of the rows")
    others = (leaf for leaf in _leaves(arguments) if not (isinstance(leaf, (Tensor, *_PLAIN)) or callable(leaf)))
    opaque = next((leaf for leaf in others if hasattr(leaf, "__dict__")), None)
    if opaque is not None:
        return Trial(None, f"it was called with a {type(opaque).__name__}, whose rows cannot be told from one another")
    trial = Trial(None, f"it was not called with tensors of {ranks} rows or more")
    for rows in dict.fromkeys(size for size in sizes if size >= ranks):
        dims = [next((dim for dim, size in enumerate(tensor.shape) if size == rows), None) for tensor in inputs]
        left = [tensor for tensor, dim in zip(inputs, dims, strict=True) if dim is None and tensor.dim()]
        # Numbers of rows (of a graph's nodes, say) would point outside of a part, which ends the runtime of a GPU.
        if not all(tensor.is_floating_point() for tensor in left):
            attempt = Trial(None, _ROWS_DEPEND)
        else:
            states = rng.capture(kind, all_devices=False)
            try:
                with _kept(variables) as changed:
                    attempt = _try(model, arguments, dims, min(rows, _ROWS), states, kind)
            except Exception as error:  # users' code may raise anything for fewer rows
                attempt = Trial(None, f"fewer of its rows give an error ({type(error).__name__})")
            finally:
                rng.restore(states, kind)
            if changed:
                attempt = Trial(None, f"a call changes {changed[0]}, which would be of a part of the rows")
        if attempt.cut is not None or not attempt.is_decided:
            return attempt
        trial = attempt if rows == sizes[0] else trial  # the second dimension is rarely one of rows
    return trial


_ROWS_DEPEND = "parts of its rows do not give what all of them give together"


def has_hooks(model: nn.Module) -> bool:
    """Return whether users' hooks on a model, or on its parameters, are called."""
    of_modules = (hook for part in model.modules() for name in _HOOKS for hook in vars(part)[name].values())
    of_parameters = (getattr(parameter, name) for parameter in model.parameters() for name in _OF_GRADIENTS)
    return any(not hook.__module__.startswith("torch.") for hook in of_modules) or any(of_parameters)


@contextlib.contextmanager
def _kept(variables: dict[str, Any]) -> Iterator[list[str]]:
    """Put variables back that the block binds, or makes longer; yield a list that gets their names then."""
    changed: list[str] = []
    bound = dict(variables)
    contents = {name: copy.copy(value) for name, value in bound.items() if type(value) in (list, dict, set, deque)}
    try:
        yield changed
    finally:
        changed += [name for name in {**bound, **variables} if bound.get(name) is not variables.get(name)]
        changed += [name for name, before in contents.items() if len(bound[name]) != len(before)]
        for name in changed:
            variables.pop(name, None)
        variables.update({name: bound[name] for name in changed if name in bound})
        for name in contents.keys() & set(changed):
            value: Any = bound[name]
            value.clear()
            value.extend(contents[name]) if isinstance(value, (list, deque)) else value.update(contents[name])


@dataclass
class _Run:
    """One call, on a fresh copy of the model."""

    tensors: list[Tensor]  # of the arguments
    results: list[Tensor]
    others: list[Any]  # what is returned besides tensors
    state: dict[str, Any]
    parameters: list[Tensor]
    printed: str
    draws: bool
    gradients: list[Tensor | None] = field(default_factory=list)

    def differentiate(self, seeds: Sequence[Tensor | None]) -> None:
        """Compute gradients, given those of the results."""
        pairs = [(out, seed) for out, seed in zip(self.results, seeds, strict=True) if seed is not None]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])
        leaves = (*self.parameters, *(tensor for tensor in self.tensors if tensor.requires_grad))
        self.gradients = [None if leaf.grad is None else leaf.grad.to_dense() for leaf in leaves]


def _run(model: nn.Module, arguments: Any, dims: Sequence[int | None], first: int, end: int) -> _Run:
    # torch copies only what was not computed.
    computed = [
        tensor for tensor in _state(model).values() if isinstance(tensor, Tensor) and tensor.grad_fn is not None
    ]
    model = copy.deepcopy(model, {id(tensor): tensor.detach() for tensor in computed})
    for module in model.modules():
        if isinstance(module, _NormBase):  # a rule that is known: each rank uses its own rows
            module.training = False
    for parameter in model.parameters():
        parameter.grad = None
    args, kwargs = narrowed(arguments, dims, first, end)
    text = io.StringIO()
    with _NoChance() as chance, contextlib.redirect_stdout(text):  # type: ignore[no-untyped-call]
        out = model(*args, **kwargs)
    return _Run(
        tensors=tensors_in((args, kwargs)),
        results=tensors_in(out),
        others=[leaf for leaf in _leaves(out) if not isinstance(leaf, Tensor)],
        state=_state(model),
        parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        printed=text.getvalue(),
        draws=chance.draws,
    )


def _try(
    model: nn.Module, arguments: Any, dims: Sequence[int | None], rows: int, states: Any, kind: DeviceKind
) -> Trial:
    ends = [(0, rows), *(bounds(rows, part, 2) for part in range(2))]
    runs = []
    for first, end in ends:
        runs.append(_run(model, arguments, dims, first, end))
        rng.restore(states, kind)
    whole, *parts = runs
    weights = [(end - first) / rows for first, end in ends[1:]]
    if any(len(part.results) != len(whole.results) for part in parts):
        return Trial(None, _ROWS_DEPEND)
    for leaf in whole.others:
        if not isinstance(leaf, _PLAIN):
            return Trial(None, f"it returns a {type(leaf).__name__}, which cannot be joined")
    if any(not all(map(_alike, part.others, whole.others)) for part in parts):
        return Trial(None, "it returns a number that would be of a part of the rows")
    if any(part.printed != whole.printed for part in parts):
        return Trial(None, "it prints, which would be about a part of the rows")
    for part in parts:
        for name, value in whole.state.items():
            if name not in part.state or not _alike(part.state[name], value):
                return Trial(None, f"a call leaves {name} in it, which would be of a part of the rows")
    each = list(zip(*(run.results for run in runs), strict=True))
    joins = [_join(result, of_parts, weights) for result, *of_parts in each]
    usable = tuple(join for join in joins if join is not None)
    if len(usable) < len(joins) or not usable:
        return Trial(None, _ROWS_DEPEND)
    # A sum, a mean and what is always the same are all 0; and what is 0 does not show which rows it depends on.
    zeros = [not bool(part.count_nonzero()) for results in each for part in results if part.numel()]
    if any(zeros):
        return Trial(None, "what it returns is 0 so far, which does not show how parts are joined", is_decided=False)
    if torch.is_grad_enabled() and not _same_gradients(runs, usable, weights, dims):
        return Trial(None, "gradients of parts of its rows are not those of all of them")
    return Trial(Cut(tuple(dims), usable), draws=whole.draws)


def _same_gradients(
    runs: Sequence[_Run], joins: Sequence[Join], weights: Sequence[float], dims: Sequence[int | None]
) -> bool:
    """Return whether gradients of parts make those of the whole."""
    whole, *parts = runs
    seeds: list[Tensor | None] = []  # gradients of results, unlike in all places, and the same at each call
    for out in whole.results:
        numbers = torch.arange(1, out.numel() + 1, device=out.device, dtype=torch.float64)
        numbers = (numbers * 0.7548776662).frac().sub(0.3).reshape(out.shape).to(out.dtype)
        seeds.append(numbers if out.requires_grad and out.is_floating_point() else None)
    if all(seed is None for seed in seeds):
        return True
    whole.differentiate(seeds)
    firsts = [0] * len(seeds)
    for part, weight in zip(parts, weights, strict=True):
        of_part: list[Tensor | None] = []
        for number, (seed, how, out) in enumerate(zip(seeds, joins, part.results, strict=True)):
            if seed is not None and isinstance(how, int):
                of_part.append(seed.narrow(how, firsts[number], out.shape[how]))
                firsts[number] += out.shape[how]
            else:
                of_part.append(seed if seed is None or how == "sum" else seed * weight)
        part.differentiate(of_part)
    dtypes = [out.dtype for out in whole.results]
    least = 6e-2 if torch.is_autocast_enabled(whole.results[0].device.type) else max(map(_tolerance, dtypes))
    of_inputs = [dim for tensor, dim in zip(whole.tensors, dims, strict=True) if tensor.requires_grad]
    ways = [None] * len(whole.parameters) + of_inputs
    each = list(zip(*(run.gradients for run in runs), strict=True))
    largest = max((g.abs().max().item() for g, *_ in each if g is not None and g.numel()), default=0.0)
    for (wanted, *gradients), dim in zip(each, ways, strict=True):
        present = [gradient for gradient in gradients if gradient is not None]
        if wanted is None or not present:
            if wanted is not None or present:
                return False
            continue
        together = sum(present) if dim is None else torch.cat(present, dim)
        # One that is 0 but for rounding, of a bias before a softmax say, is compared with the others.
        if not _close(together, wanted, least, of_others=largest * 1e-3):
            return False
    return True


def _join(whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> Join | None:
    """Return how parts make the whole; None if they do not."""
    if any(part.shape != whole.shape for part in parts):
        for dim in range(whole.dim()):
            with contextlib.suppress(RuntimeError):  # of other shapes
                if _close(torch.cat(list(parts), dim), whole):
                    return dim
        return None
    if all(_close(part, whole) for part in parts):
        return "same"
    if whole.is_floating_point() and _close(sum(p * weight for p, weight in zip(parts, weights, strict=True)), whole):
        return "mean"
    return "sum" if _close(sum(parts), whole) else None


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, 4e-3)


def _close(actual: Any, wanted: Tensor, least: float = 0.0, *, of_others: float = 0.0) -> bool:
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(actual, wanted)
    largest = max(torch.nan_to_num(wanted).abs().max().item(), of_others)
    atol = max(_tolerance(wanted.dtype), least) * largest
    return torch.allclose(actual, wanted, rtol=0.0, atol=atol, equal_nan=True)


def _alike(actual: Any, wanted: Any) -> bool:
    if type(actual) is not type(wanted):
        return False
    if isinstance(wanted, Tensor):
        return _close(actual.detach(), wanted.detach())
    if isinstance(wanted, np.ndarray):
        return bool(np.array_equal(actual, wanted))
    if isinstance(wanted, float):
        return math.isclose(actual, wanted, rel_tol=1e-3) or (math.isnan(actual) and math.isnan(wanted))
    return not isinstance(wanted, _PLAIN) or actual == wanted


def _leaves(data: Any) -> Iterator[Any]:
    inside = children_of(data)
    if inside is None:
        yield data
    else:
        for item in inside[0]:
            yield from _leaves(item)


def _state(model: nn.Module) -> dict[str, Any]:
    """Return what a model holds, in objects and containers too, by its path."""
    values: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    seen = set[int]()
    while pending:
        path, value = pending.pop()
        is_called = callable(value) and not isinstance(value, nn.Module)
        if is_called or isinstance(value, (Tensor, np.ndarray, *_PLAIN)):
            values[path] = value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            inside = {name: part for name, part in vars(value).items() if name not in _OF_TORCH}
            items = {**inside.pop("_parameters"), **inside.pop("_buffers"), **inside.pop("_modules"), **inside}
        elif isinstance(value, Mapping):
            items = {str(key): part for key, part in value.items()}
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            items = {str(number): part for number, part in enumerate(value)}
            values[f"{path} (how many)"] = len(items)
        else:
            items = getattr(value, "__dict__", {})
        pending += [(f"{path}.{name}" if path else name, part) for name, part in items.items()]
    return values


class _NoChance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes random numbers equal, so that they do not differ between all rows and parts. Dropout drops nothing."""

    draws = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - there is no public way
        arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        chance = next((name for name in ("dropout_p", "dropout", "p") if name in arguments), "p")
        if "bernoulli" not in func.name():
            self.draws = self.draws or arguments.get(chance) != 0.0  # attention without dropout, say
            if chance in arguments:
                return func(**{**arguments, chance: 0.0})
        result = func(*args, **(kwargs or {}))
        if "bernoulli" in func.name():
            self.draws = True
            p = arguments.get("p", arguments["self"] if func.name().endswith("bernoulli") else None)
            return result.copy_(p) if isinstance(p, Tensor) else result.fill_(0.5 if p is None else p)
        for tensor in tensors_in(result):
            tensor.fill_(0.5) if tensor.is_floating_point() else tensor.zero_()
        return result
