"""Hooks that run before and after the forward of one module, and change what goes in and out."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import override

from nb_accelerate.base.devices import DEVICE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

DEVICE_METHODS = tuple(kind.name for kind in DEVICE_KINDS)
"""Methods that move a model to a device, as ``cuda``. `dispatch_model` replaces them, and ``to``, by refusals."""


class ModelHook:
    """Code that runs before and after the forward of a module. The base class changes nothing.

    A hook gets keyword arguments too, and can replace what the module gets and returns.

    Examples:
        ```python
        class Doubled(ModelHook):
            def post_forward(self, module, output):
                return 2 * output


        add_hook_to_module(model, Doubled())
        ```

    Attributes:
        no_grad: compute the forward under `torch.no_grad`.
    """

    no_grad = False

    @property
    def under_compiler(self) -> Literal["traced", "left out", "run"]:
        """What `torch.compile` does with it: trace it, compile the module without it, or run both without compiling."""
        return "traced"

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare a module, and return it. `add_hook_to_module` calls this."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ARG002
        """Return the arguments that the forward gets, and the keyword arguments."""
        return args, kwargs

    def compute(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        """Call the forward of a module. This is no method of accelerate's hooks."""
        if not self.no_grad:
            return forward(*args, **kwargs)
        with torch.no_grad():
            return forward(*args, **kwargs)

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ARG002
        """Return what a caller gets in place of the output of the forward."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Undo what ``pre_forward`` did. Called in place of ``post_forward`` if the forward raises."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo what ``init_hook`` did, and return the module. `remove_hook_from_module` calls this."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each event goes to each of them, in their order.

    Args:
        *hooks: the hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    @override
    def under_compiler(self) -> Literal["traced", "left out", "run"]:
        wanted = {hook.under_compiler for hook in self.hooks}
        return wanted.pop() if len(wanted) == 1 else "run" if "run" in wanted else "traced"

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with contextlib.ExitStack() as undo:
            for hook in self.hooks:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
                undo.callback(hook.forward_failed, module)
            undo.pop_all()
        return args, kwargs

    @override
    def compute(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for hook in self.hooks:
            forward = functools.partial(_compute, hook, module, forward)
        return forward(*args, **kwargs)

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    @override
    def forward_failed(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.forward_failed(module)

    @override
    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _compute(hook: ModelHook, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return hook.compute(module, forward, args, kwargs)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Have a hook run around the forward of a module, and return the module, which is changed in place.

    Args:
        module: gets the attribute ``_hf_hook``. Its own forward is in ``_old_forward``.
        hook: takes the place of a hook that is there.
        append: run it after the hook that is there, both in one `SequentialHook`.
    """
    if append and isinstance(before := getattr(module, "_hf_hook", None), ModelHook):
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    if not hasattr(module, "_hf_hook") or not hasattr(module, "_old_forward"):
        module._old_forward = module.forward  # type: ignore[assignment]  # noqa: SLF001 - others read these names
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]  # noqa: SLF001
    hooked = functools.partial(_hooked_forward, module)
    module.forward = functools.update_wrapper(hooked, module._old_forward)  # type: ignore[arg-type]  # noqa: SLF001
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        how = module._hf_hook.under_compiler  # noqa: SLF001
        if how == "left out":
            return module._old_forward(*args, **kwargs)  # noqa: SLF001
        if how == "run":
            return torch.compiler.disable(_run)(module, *args, **kwargs)  # type: ignore[no-untyped-call]
    return _run(module, *args, **kwargs)


def _run(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook  # noqa: SLF001
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        output = hook.compute(module, module._old_forward, args, kwargs)  # noqa: SLF001
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Give a module its own forward back, and return the module. Its weights are then where they rest.

    Args:
        module: with or without a hook.
        recurse: do the same for all modules in it.
    """
    kept = vars(module)
    if (hook := kept.pop("_hf_hook", None)) is not None:
        hook.detach_hook(module)
    if (forward := kept.pop("_old_forward", None)) is not None:
        kept.pop("forward", None)
        if getattr(forward, "__func__", None) is not type(module).forward:
            module.forward = forward  # it had been replaced before
    for name in ("to", *DEVICE_METHODS):
        kept.pop(name, None)
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all modules in it. A placed model is a plain one then, with its weights."""
    remove_hook_from_module(module, recurse=True)
