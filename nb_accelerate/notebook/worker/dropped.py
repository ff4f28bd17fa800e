"""Find models of the notebook that a launched function trains and does not return.

A launch sends a copy of the models that its function uses, or forks it. What is trained is the copy, which ends with
the rank: the notebook's own model is as it was, and nothing would say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class WatchedModels:
    """The models of the notebook that a call can reach, as they were before it.

    Args:
        function: what is called.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        torch: Any = imported("torch")
        # Without its nn, torch is being imported, or is none.
        self._nn: Any = getattr(torch, "nn", None)
        self._tensor: Any = getattr(torch, "Tensor", ())
        self._before: list[tuple[str, Any, tuple[int, ...]]] = []
        if self._nn is None:
            return
        seen = set()
        for name, value in _reached(function, args, kwargs):
            # Not isinstance(), which believes what a value says.
            if issubclass(type(value), self._nn.Module) and id(value) not in seen:
                seen.add(id(value))
                self._before.append((name, value, _versions(value)))

    def dropped(self, value: object) -> tuple[str, ...]:
        """Return the names of those whose parameters have changed since, and that are not in what was returned.

        Args:
            value: what the function returned.
        """
        changed = {name: model for name, model, before in self._before if before and _versions(model) != before}
        if not changed:
            return ()
        leaves = list(_leaves(value))
        if any(issubclass(type(leaf), self._nn.Module) for leaf in leaves):
            return ()
        # By shape: what comes from an accelerator device, or from shards, is a copy.
        tensors: list[Any] = [leaf for leaf in leaves if issubclass(type(leaf), self._tensor)]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        return tuple(
            name for name, model in changed.items() if not {tuple(p.shape) for p in model.parameters()} <= shapes
        )


def _reached(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a call can reach of the notebook, with the name it has there or in the call."""
    function = getattr(function, "func", function)  # functools.partial
    found = getattr(function, "__globals__", {})
    if found.get("__name__") in ("__main__", "__mp_main__"):  # the second: see `pack_call`
        yield from list(found.items())
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def _versions(model: Any) -> tuple[int, ...]:
    """Return how often each parameter was written to; nothing if that cannot be known."""
    try:
        return tuple(parameter._version for parameter in model.parameters())  # noqa: SLF001 - there is no public name
    except Exception:  # parameters of inference mode have no versions, and a model is users' code
        return ()


def _leaves(value: object) -> Iterator[object]:
    """Yield what is in nested lists, tuples and dicts."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if issubclass(type(one), dict):
            pending += dict.values(one)  # type: ignore[arg-type]
        elif issubclass(type(one), (list, tuple)):
            pending += one  # type: ignore[arg-type]
        else:
            yield one
