"""Rewrite a plain training loop to one with an `Accelerator`. Pure: text in, text out.

Only the places that change are edited, so comments and layout stay.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import dropwhile
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.loop_calls import (
    bind,
    functions_of,
    is_method,
    own_nodes,
    parameters,
    unsure,
    walk,
)
from nb_accelerate.magics.loop_edits import Edits
from nb_accelerate.magics.loop_precision import CLIPS, unscaled_loss
from nb_accelerate.magics.loop_precision_edits import accelerator_line, rewrite_precision, scaler_names
from nb_accelerate.magics.loop_reading import read_loop
from nb_accelerate.magics.loop_totals import runs_on_all_ranks

if TYPE_CHECKING:
    from nb_accelerate.magics.loop_calls import Scope
    from nb_accelerate.magics.loop_reading import TrainingLoop

_DEVICE_WORDS = ("cpu", "cuda", "mps", "xpu")

_NAMES_SHOWN = 6
"""Names that a note lists."""


@dataclass(frozen=True)
class Rewritten:
    """A cell that was rewritten.

    Attributes:
        text: of the new cell.
        notes: what stays as it was and may have to be changed by hand, one line each. Lines are those of the cell that
            was given.
    """

    text: str
    notes: tuple[str, ...]


def rewrite(source: str, *, launch: bool = False) -> Rewritten:
    """Return the Accelerator version of a cell with one plain training loop.

    Args:
        source: of the cell.
        launch: also put the loop in a function, and launch it on all devices.

    Raises:
        ConfigError: the loop is not wholly understood; says where, and why.
    """
    source = source if source.endswith("\n") else f"{source}\n"
    loop = read_loop(source)
    edits = Edits(source)
    if loop.outer is not None and loop.prepare_after is not None:
        _insert_accelerator(loop, loop.outer, loop.prepare_after, edits)
    loop.totals.apply(edits)
    _rewrite_calls(loop, edits)
    rewrite_precision(loop, edits)
    _rewrite_devices(loop, edits)
    if isinstance(loop.outer, ast.FunctionDef):
        _pass_accelerator(loop, loop.outer, edits)
    text = edits.text()
    if launch:
        text = _launched(text, loop)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"the changed cell could not be read ({error}). Nothing was changed") from error
    return Rewritten(text, (*_notes(loop), *(_local_names(loop) if launch else ())))


def _insert_accelerator(loop: TrainingLoop, outer: Scope, prepare_after: ast.stmt, edits: Edits) -> None:
    if ";" in _line_of(edits.source, prepare_after.end_lineno or 1).partition("#")[0]:
        raise unsure(prepare_after, "two statements in one line; write them in two")
    top = next(one for one in loop.tree.body if not (isinstance(one, ast.ImportFrom) and one.module == "__future__"))
    if isinstance(top, (ast.FunctionDef, ast.ClassDef)) and top.decorator_list:
        raise unsure(top, "a decorated definition before anything else; put an import above it")
    edits.insert_before(top, "from nb_accelerate import Accelerator")
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    first = next(
        one
        for one in outer.body
        if not isinstance(one, quiet) and not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    )
    edits.insert_before(first, accelerator_line(loop))
    names = ", ".join([loop.model, loop.optimizer, loop.loader, *loop.schedulers])
    edits.insert_after(prepare_after, f"{names} = accelerator.prepare({names})")


def _pass_accelerator(loop: TrainingLoop, outer: ast.FunctionDef, edits: Edits) -> None:
    """Give the functions that use the accelerator of another one a first argument for it."""
    functions = functions_of(loop.tree)
    scopes: list[Scope] = [loop.tree, *functions.values()]
    calls = [
        (scope, functions[call.func.id], call)
        for scope in scopes
        for call in own_nodes(scope)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in functions
    ]
    have = {one for one in functions.values() if any(arg.arg in scaler_names(loop, one) for arg in parameters(one))}
    using = [
        one
        for one in functions.values()
        if one is not outer and one not in have and "accelerator" in edits.changes(one)
    ]
    for function in using:  # it grows: who calls such a function has to have the accelerator too
        callers = [scope for scope, called, _ in calls if called is function]
        if loop.tree in callers:
            raise unsure(function, f"{function.name} is called outside {outer.name} too, where there is no accelerator")
        using += [
            one
            for one in callers
            if isinstance(one, ast.FunctionDef) and one is not outer and one not in have and one not in using
        ]
    for function in using:
        positional = [*function.args.posonlyargs, *function.args.args]
        if not positional:
            raise unsure(function, f"{function.name} has no argument before which the accelerator could stand")
        edits.insert_argument(positional[0], "accelerator, ")
    for _, called, call in calls:
        if called in using:
            given = [*call.args, *(one.value for one in call.keywords)]
            if not call.args and given:
                raise unsure(call, f"{ast.unparse(call)!r} has arguments by name only; write the first without")
            edits.insert_argument(call.args[0], "accelerator, ")


def _nodes(loop: TrainingLoop) -> list[tuple[Scope, ast.AST]]:
    return [(scope, node) for scope in loop.names for node in own_nodes(scope)]


def _calls(loop: TrainingLoop) -> list[ast.Call]:
    return [node for _, node in _nodes(loop) if isinstance(node, ast.Call)]


def _rewrite_calls(loop: TrainingLoop, edits: Edits) -> None:
    source = edits.source
    loss = ast.get_source_segment(source, unscaled_loss(loop.backward))
    edits.replace(loop.backward, f"accelerator.backward({loss})")
    for scope, call in _nodes(loop):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] in CLIPS:
            edits.replace(call.func, f"accelerator.{name.rpartition('.')[2]}")
        elif name == "torch.save":
            edits.replace(call.func, "accelerator.save")
        elif is_method(call, "state_dict") and loop.names[scope].get(name.rpartition(".")[0]) == loop.model:
            edits.replace(call.func, f"accelerator.unwrap_model({name.rpartition('.')[0]}).state_dict")
        elif name == f"{loop.own_loss}.item" and runs_on_all_ranks(call, loop.loop):
            edits.replace(call.func, f'accelerator.reduce({loop.own_loss}.detach(), "mean").item')


def _rewrite_devices(loop: TrainingLoop, edits: Edits) -> None:
    nodes = [node for _, node in _nodes(loop)]
    stored = any(isinstance(one, ast.Name) and one.id == "device" and isinstance(one.ctx, ast.Store) for one in nodes)
    for scope, one in _nodes(loop):
        own = [arg.arg for arg in parameters(scope)] if isinstance(scope, ast.FunctionDef) else []
        if isinstance(one, ast.Name) and one.id == "device" and not stored and "device" not in own:
            raise unsure(one, "'device' is made elsewhere; write device = 'cpu' beside the loop, which is replaced")
    moved_to = {
        ast.unparse(value)
        for call in _calls(loop)
        for value in [*(call.args[:1] if is_method(call, "to") else ()), *_values(call, "device")]
    }
    for made in nodes:
        if not isinstance(made, ast.Assign):
            continue
        name = ast.unparse(made.targets[0])
        if _is_device(made.value) and (name in moved_to or name == "device" or not _is_device_word(made.value)):
            edits.replace(made.value, "accelerator.device")
        elif name == "device":
            raise unsure(made, f"{ast.unparse(made)!r} is not a device that is understood")
    for call in _calls(loop):
        if is_method(call, "cuda"):
            if call.args or call.keywords:
                raise unsure(call, f"{ast.unparse(call)!r} chooses one GPU; each rank has its own")
            assert isinstance(call.func, ast.Attribute)
            value = ast.get_source_segment(edits.source, call.func.value)
            edits.replace(call, f"{value}.to(accelerator.device)")
        elif _is_device(call):
            edits.replace(call, "accelerator.device")
        for value in [*(call.args[:1] if is_method(call, "to") else ()), *_values(call, "device")]:
            if _is_device(value):
                edits.replace(value, "accelerator.device")
    _rewrite_device_arguments(loop, moved_to, edits)


def _rewrite_device_arguments(loop: TrainingLoop, moved_to: set[str], edits: Edits) -> None:
    """Replace the devices that are passed to functions of the cell, which move something there."""
    functions = functions_of(loop.tree)
    for scope in loop.names:
        if isinstance(scope, ast.FunctionDef) and scope is not loop.outer:
            for default in (*scope.args.defaults, *scope.args.kw_defaults):
                if default is not None and _is_device(default):
                    raise unsure(default, f"{scope.name} chooses a device by default; pass it in the call instead")
    for call in _calls(loop):
        if isinstance(call.func, ast.Name) and call.func.id in functions and any(map(_is_device, _arguments(call))):
            for name, value in bind(call, functions[call.func.id]).items():
                if _is_device(value) and name in moved_to:
                    edits.replace(value, "accelerator.device")


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(one.value for one in call.keywords)]


def _values(call: ast.Call, name: str) -> list[ast.expr]:
    return [one.value for one in call.keywords if one.arg == name]


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_device(value.body) and _is_device(value.orelse)
    if isinstance(value, ast.Call):
        if ast.unparse(value.func) == "torch.accelerator.current_accelerator":
            return True
        return ast.unparse(value.func) == "torch.device" and len(value.args) == 1 and _is_device(value.args[0])
    if isinstance(value, ast.Attribute):
        return value.attr == "type" and isinstance(value.value, ast.Call) and _is_device(value.value)
    return _is_device_word(value)


def _is_device_word(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and value.value.partition(":")[0] in _DEVICE_WORDS
    )


def _launched(text: str, loop: TrainingLoop) -> str:
    """Put all but the imports in a function, and launch it."""
    if not isinstance(loop.outer, ast.Module):
        function = loop.outer or loop.scope
        assert isinstance(function, ast.FunctionDef)
        raise unsure(
            function,
            f"the loop is in a function already. Without --launch, then: notebook_launcher({function.name}, "
            "args=(...))",
        )
    tree = ast.parse(text)
    for one in ast.walk(tree):
        is_text = isinstance(one, (ast.Constant, ast.JoinedStr)) and one.end_lineno != one.lineno
        if is_text or isinstance(one, (ast.Global, ast.Nonlocal)):
            raise unsure(
                one, "text over several lines, or global: not moved into a function. Write it without --launch"
            )
    if any(isinstance(one, ast.Name) and one.id == "train" for one in ast.walk(tree)):
        raise ConfigError("the name 'train' is used already, so --launch cannot use it. Nothing was changed")
    lines = text.split("\n")[:-1]
    head = 0
    for statement in tree.body:
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        head = statement.end_lineno or 0
    body = [f"    {line}" if line.strip() else line for line in lines[head:]]
    while body and not body[0].strip():
        body.pop(0)
    ours = "from nb_accelerate import Accelerator"
    imports = [f"{ours}, notebook_launcher" if line == ours else line for line in lines[:head]]
    return "\n".join([*imports, "", "", "def train():", *body, "", "", "notebook_launcher(train)", ""])


def _local_names(loop: TrainingLoop) -> list[str]:
    """Return a note on the names that a launch keeps from later cells; none if there are none."""
    body = list(dropwhile(lambda one: isinstance(one, (ast.Import, ast.ImportFrom)), loop.tree.body))
    assigning = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
    stored: dict[str, None] = {}
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            stored[statement.name] = None
            continue
        for one in ast.walk(statement):
            if isinstance(one, ast.alias):
                stored[(one.asname or one.name).partition(".")[0]] = None
            elif isinstance(one, assigning):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                names = [name for target in targets for name in walk(target, ast.Name)]
                stored.update(dict.fromkeys(name.id for name in names if isinstance(name.ctx, ast.Store)))
    first = [name for name in (loop.model, loop.optimizer, loop.loader, *loop.schedulers) if name in stored]
    local = [*first, *(name for name in stored if name not in first)]
    if not local:
        return []
    shown, more = local[:_NAMES_SHOWN], len(local) - _NAMES_SHOWN
    listed = ", ".join(shown) + (f" and {more} more" if more > 0 else "")
    return [
        f"later cells do not have {listed}, which are local to train(). Return what they use; every rank's comes back:",
        f"    return {local[0]}  # as the last line of train()",
        f"{local[0]} = notebook_launcher(train)[0]  # that of rank 0",
    ]


def _notes(loop: TrainingLoop) -> list[str]:
    notes = []
    if loop.outer is None:
        names = ", ".join([loop.model, loop.optimizer, loop.loader, *loop.schedulers])
        notes += [
            f"in the cell that makes {names}, before it calls {loop.scope.name}:",  # type: ignore[union-attr]
            "    from nb_accelerate import Accelerator",
            f"    {accelerator_line(loop)}",
            f"    {names} = accelerator.prepare({names})",
        ]
        if any(one.arg == "device" for one in walk(loop.tree, ast.arg)):
            notes.append("    device = accelerator.device")
        if loop.precision.scaler and loop.precision.scaler_made is None:
            notes.append(f"and give {loop.scope.name} the accelerator in the place of {loop.precision.scaler}")  # type: ignore[union-attr]
    for scope, call in _nodes(loop):
        if not (isinstance(call, ast.Call) and is_method(call, "item")) or loop.totals.has_changed(call):
            continue
        own = scope is loop.scope and ast.unparse(call.func) == f"{loop.own_loss}.item"
        if (own or call in ast.walk(loop.loop)) and not (own and runs_on_all_ranks(call, loop.loop)):
            notes.append(f"line {call.lineno} of this cell: {ast.unparse(call)} is of this rank's rows only")
    totals, divisors = loop.judged
    notes += totals
    for scope, one in _nodes(loop):
        if isinstance(one, ast.Attribute) and one.attr == "dataset" and one not in divisors:
            name = ast.unparse(one.value)
            if loop.names[scope].get(name) == loop.loader:
                notes.append(
                    f"line {one.lineno} of this cell: {name}.dataset has the rows of all ranks, so rows of batches "
                    "beside it are too small by the number of ranks; multiply them by accelerator.num_processes"
                )
    others = [
        ast.unparse(made.targets[0])
        for _, made in _nodes(loop)
        if isinstance(made, ast.Assign)
        and isinstance(made.value, ast.Call)
        and ast.unparse(made.value.func).rpartition(".")[2] == "DataLoader"
        and ast.unparse(made.targets[0]) != loop.loader
    ]
    notes += [f"{name} is not shared out: every rank reads all of it" for name in others]
    notes += [
        f"line {call.lineno} of this cell: {ast.unparse(call.func)} is outside autocast"
        for call in loop.precision.outside
    ]
    if loop.epoch_schedulers:
        notes.append(f"{', '.join(loop.epoch_schedulers)} steps once for each epoch, so it is not prepared")
    return notes


def _line_of(source: str, number: int) -> str:
    return source.split("\n")[number - 1]
