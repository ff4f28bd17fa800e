"""Read the arguments of ``autocast`` and ``GradScaler``. Pure: nothing is run."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import parameters, unsure, walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.magics.loop_calls import Scope

_DTYPES = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}
"""Values of ``mixed_precision`` by the dtype of autocast."""

_DEFAULT_DTYPES = {"cuda": "fp16", "cpu": "bf16"}
"""Values of ``mixed_precision`` by the type of device, for autocast blocks that name no dtype."""


def has_plain_device(call: ast.Call) -> bool:
    """Whether the type of device of an autocast block stays what it is when ``device`` is that of the accelerator."""
    value = _device(call)
    is_type = isinstance(value, ast.Attribute) and value.attr == "type"
    return value is None or isinstance(value, ast.Constant) or is_type


def _takes_device(call: ast.Call, tree: ast.Module) -> bool:
    """Whether the first argument of an autocast block or of a scaler is the type of device, and not ``enabled``.

    Raises:
        ConfigError: it may be either.
    """
    full = _full_name(call.func, tree)
    if ".cuda." in full or ".cpu." in full:
        return False
    first = call.args[0] if call.args else None
    if first is None or (isinstance(first, ast.Constant) and isinstance(first.value, str)):
        return True
    if isinstance(first, ast.Constant):
        return False
    if "." in full:
        return True
    raise unsure(call, f"which autocast {ast.unparse(call.func)!r} is; write torch.autocast(...) in full")


def _full_name(function: ast.expr, tree: ast.Module) -> str:
    """Return the name of a function with its module, as far as the imports of a cell say."""
    written = ast.unparse(function)
    root, _, rest = written.partition(".")
    for one in walk(tree, ast.ImportFrom):
        for alias in one.names:
            if (alias.asname or alias.name) == root:
                return ".".join(part for part in (one.module, alias.name, rest) if part)
    for plain in walk(tree, ast.Import):
        for alias in plain.names:
            if alias.asname == root:
                return f"{alias.name}.{rest}" if rest else alias.name
    return written


def _device(call: ast.Call) -> ast.expr | None:
    """Return the argument of autocast or GradScaler that names the type of device; None if there is none."""
    named = [one.value for one in call.keywords if one.arg in ("device_type", "device")]
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and not isinstance(first.value, str):
        first = None
    return named[0] if named else first


def _arguments(call: ast.Call, tree: ast.Module) -> dict[str, ast.expr]:
    """Return the arguments of autocast by name.

    Raises:
        ConfigError: one of them has no counterpart.
    """
    positional = ["device_type", "dtype", "enabled"] if _takes_device(call, tree) else ["enabled", "dtype"]
    if len(call.args) > len(positional) or any(isinstance(one, ast.Starred) for one in call.args):
        raise unsure(call, f"{ast.unparse(call)!r} has arguments that are not understood")
    found = dict(zip(positional, call.args, strict=False))
    for one in call.keywords:
        if one.arg not in ("device_type", "dtype", "enabled"):
            raise unsure(call, f"{one.arg}= of autocast is not understood; take it out first")
        found[one.arg] = one.value
    return found


def condition_of(call: ast.Call, tree: ast.Module, names: Mapping[Scope, Mapping[str, str]]) -> str:
    """Return what enables an autocast block: ``True``, ``False``, or the source of a name."""
    return _enabled(_arguments(call, tree).get("enabled"), tree, names)


def scaler_condition(call: ast.Call, tree: ast.Module, names: Mapping[Scope, Mapping[str, str]]) -> str:
    """Return what enables a GradScaler: ``True``, ``False``, or the source of a name."""
    keywords = {one.arg: one.value for one in call.keywords}
    first_is_device = _takes_device(call, tree)
    for name in keywords:
        if name not in ("device", "enabled"):
            raise unsure(
                call,
                f"{name}= of GradScaler is not understood; take it out, and write "
                f"Accelerator(kwargs_handlers=[GradScalerKwargs({name}=...)]) afterwards",
            )
    if len(call.args) > 1 or (call.args and not first_is_device):
        raise unsure(call, f"{ast.unparse(call)!r} has arguments that are not understood")
    return _enabled(keywords.get("enabled"), tree, names)


def _enabled(value: ast.expr | None, tree: ast.Module, names: Mapping[Scope, Mapping[str, str]]) -> str:
    if value is None:
        return "True"
    meant = _assigned(value, tree)
    if isinstance(meant, ast.Constant) and isinstance(meant.value, bool):
        return str(meant.value)
    root = ast.unparse(value).partition(".")[0]
    own = {one.arg for where in names if isinstance(where, ast.FunctionDef) for one in parameters(where)}
    stored = {one.id for one in walk(tree, ast.Name) if isinstance(one.ctx, ast.Store)}
    stored |= {one.name for one in tree.body if isinstance(one, (ast.ClassDef, ast.FunctionDef))}
    if isinstance(value, (ast.Name, ast.Attribute)) and root.isidentifier() and root not in own | stored:
        return ast.unparse(value)  # of another cell, so it is known where the accelerator is made
    raise unsure(
        value, f"whether enabled={ast.unparse(value)} is true is not known; write enabled=True or leave it out"
    )


def dtype_of(call: ast.Call, tree: ast.Module, scaler: ast.Call | None) -> str:
    """Return the mixed precision of an autocast block: of its dtype, or else of its type of device."""
    given = _arguments(call, tree)
    if "dtype" in given:
        known = _DTYPES.get(ast.unparse(_assigned(given["dtype"], tree)))
        if known is None:
            raise unsure(
                call, f"dtype={ast.unparse(given['dtype'])} is not known here; write torch.float16 or bfloat16"
            )
        return known
    full = _full_name(call.func, tree)
    if not _takes_device(call, tree) or "device_type" not in given:
        return _DEFAULT_DTYPES["cpu" if ".cpu." in full else "cuda"]
    words = _device_words(given["device_type"], tree)
    if len(words) != 1 and scaler is not None:
        device = _device(scaler)
        words = {"cuda"} if device is None else _device_words(device, tree)
    [word] = words if len(words) == 1 else [""]
    if word not in _DEFAULT_DTYPES:
        raise unsure(
            call,
            f"the dtype of {ast.unparse(call)!r} depends on the device; write dtype=torch.float16 or bfloat16 in it",
        )
    return _DEFAULT_DTYPES[word]


def _device_words(value: ast.expr, tree: ast.Module) -> set[str]:
    """Return the types of device that an expression may stand for; with an empty one if that is not known."""
    meant = _assigned(value, tree)
    if isinstance(meant, ast.IfExp):
        return _device_words(meant.body, tree) | _device_words(meant.orelse, tree)
    if isinstance(meant, ast.Attribute) and meant.attr == "type":
        return _device_words(meant.value, tree)
    if isinstance(meant, ast.Call) and ast.unparse(meant.func) == "torch.device" and len(meant.args) == 1:
        return _device_words(meant.args[0], tree)
    if isinstance(meant, ast.Constant) and isinstance(meant.value, str):
        return {meant.value.partition(":")[0]}
    return {""}


def _assigned(value: ast.expr, tree: ast.Module) -> ast.expr:
    """Return the only expression that a name, or an attribute of a class of the cell, is assigned; else itself."""
    if isinstance(value, ast.Name):
        stores = [one for one in walk(tree, ast.Name) if one.id == value.id and isinstance(one.ctx, ast.Store)]
        taken = any(one.arg == value.id for one in walk(tree, ast.arg))
        made = [one for one in walk(tree, ast.Assign) if one.targets == stores]
        return made[0].value if len(made) == 1 and not taken else value
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        classes = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == value.value.id]
        set_later = any(one.attr == value.attr and isinstance(one.ctx, ast.Store) for one in walk(tree, ast.Attribute))
        made = [
            one
            for kind in classes
            for one in kind.body
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == value.attr and len(one.targets) == 1
        ]
        return made[0].value if len(classes) == 1 and len(made) == 1 and not set_later else value
    return value
