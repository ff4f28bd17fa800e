"""Find the parts of a training loop in the source of a cell. Pure: nothing is run.

What is found is complete, or there is an error: a loop that is understood in part would be rewritten to one that trains
something else.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OPTIMIZERS = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Classes of ``torch.optim`` that step without a closure."""

_NOT_HERE = {
    "DistributedDataParallel": "is wrapped by accelerator.prepare already",
    "DDP": "is wrapped by accelerator.prepare already",
    "DataParallel": "holds copies of the model in one process",
    "DistributedSampler": "splits the rows, which the prepared loader does",
    "init_process_group": "makes the process group, which Accelerator() does",
    "GradScaler": "scales the loss, which Accelerator(mixed_precision='fp16') does",
    "autocast": "chooses the precision, which Accelerator(mixed_precision='bf16') does",
    "set_device": "chooses a device, which Accelerator() does",
    "LBFGS": "steps with a closure",
    "ReduceLROnPlateau": "needs a metric that is the same on all ranks",
    "Accelerator": "is there already",
    "no_sync": "belongs to a loop that is distributed already",
}
"""Names that a plain loop does not have, and what they do."""

_OF_MODEL = frozenset(
    {
        "train",
        "eval",
        "parameters",
        "named_parameters",
        "zero_grad",
        "state_dict",
        "to",
        "cuda",
        "cpu",
        "requires_grad_",
        "modules",
        "training",
    }
)
"""Attributes of a model that its wrapper has too, or that are rewritten."""

_AROUND_LOADERS = frozenset({"enumerate", "tqdm", "tqdm_notebook"})
"""Calls that give each batch of a loader once, in its order."""

_LOOPS = (ast.For, ast.While)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)

_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(frozen=True)
class TrainingLoop:
    """The parts of a loop; every node is one of `tree`.

    Attributes:
        tree: of the cell.
        body: statements of the function that trains, or of the cell.
        function: that trains; None if it is the cell itself.
        loop: over the batches.
        backward: the call of ``loss.backward()``.
        model, optimizer, loader: their names.
        schedulers: names of those that step with each batch.
        prepare_after: the last statement that makes one of them.
        own_loss: the name whose ``backward`` is called; empty for an expression.
        epoch_schedulers: names of those that step once for each epoch.
    """

    tree: ast.Module
    body: list[ast.stmt]
    function: ast.FunctionDef | None
    loop: ast.For
    backward: ast.Call
    model: str
    optimizer: str
    loader: str
    schedulers: tuple[str, ...]
    prepare_after: ast.stmt
    own_loss: str
    epoch_schedulers: tuple[str, ...]


def unsure(node: ast.AST, why: str) -> ConfigError:
    """Return the error that says where a loop is not understood, and why."""
    return ConfigError(f"line {getattr(node, 'lineno', 1)}: {why}. Nothing was changed")


def read_loop(source: str) -> TrainingLoop:
    """Find the parts of the one training loop of a cell.

    Args:
        source: of the cell, Python without magics.

    Raises:
        ConfigError: there is no loop, or more than one, or it has a part that is not understood; with its line.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(
            f"line {error.lineno}: this is not Python ({error.msg}); put magics and commands in a cell of their own. "
            "Nothing was changed"
        ) from None
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    _refuse_names(tree)
    backward = _the_backward(tree)
    function = next((one for one in _above(backward, parents) if isinstance(one, _SCOPES)), None)
    if function is not None and (not isinstance(function, ast.FunctionDef) or parents[function] is not tree):
        raise unsure(function, "the loop is in a class, or in a function inside another one; write it out in the cell")
    scope: ast.Module | ast.FunctionDef = function or tree
    loop = next((one for one in _above(backward, parents) if isinstance(one, _LOOPS)), None)
    if not isinstance(loop, ast.For):
        raise unsure(backward, "backward() is not in a for loop over batches")
    optimizer_made, optimizer, model = _the_optimizer(scope)
    loader = _the_loader(loop, scope)
    made = _makers(scope)
    stepping = {
        name: _steps(scope, name)
        for name, (_, call) in made.items()
        if "lr_scheduler" in ast.unparse(call.func) or _last_name(call.func).endswith("LR")
    }
    with_batches = tuple(name for name, steps in stepping.items() if any(loop in _above(s, parents) for s in steps))
    by_name = [*([made[model][0]] if model in made else []), optimizer_made, made[loader][0]]
    by_name += [made[name][0] for name in with_batches]
    # An assignment such as `model = model.to(device)` makes the model too.
    by_name += [one for one in scope.body if isinstance(one, ast.Assign) and _target(one) in (model, optimizer, loader)]
    for statement in by_name:
        if statement not in scope.body:
            raise unsure(statement, f"{ast.unparse(statement)!r} is inside a loop or a branch, so it may be made twice")
    last = max(by_name, key=lambda one: one.lineno)
    first_loop = next(one for one in scope.body if one is loop or loop in ast.walk(one))
    if last.lineno >= first_loop.lineno:
        raise unsure(last, f"{_target(last)!r} is assigned again after the loop has begun")
    if model not in made and not any(_target(one) == model for one in scope.body):
        raise unsure(optimizer_made, f"{model!r} is not made in {'this function' if function else 'this cell'}")
    _refuse_attributes(scope, model, loader, loop)
    _refuse_elsewhere(tree, scope)
    return TrainingLoop(
        tree=tree,
        body=scope.body,
        function=function,
        loop=loop,
        backward=backward,
        model=model,
        optimizer=optimizer,
        loader=loader,
        schedulers=with_batches,
        prepare_after=last,
        own_loss=backward.func.value.id if isinstance(backward.func.value, ast.Name) else "",  # type: ignore[attr-defined]
        epoch_schedulers=tuple(name for name in stepping if name not in with_batches),
    )


def walk(root: ast.AST, kind: type[_Node]) -> Iterator[_Node]:
    """Yield the nodes of one kind below a node."""
    return (one for one in ast.walk(root) if isinstance(one, kind))


def is_method(call: ast.Call, name: str) -> bool:
    """Whether a call is that of an attribute of this name."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


def _refuse_names(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in _NOT_HERE:
            raise unsure(node, f"{name} {_NOT_HERE[name]}; take it out first")
        if name == "accelerator":
            raise unsure(node, "the name 'accelerator' is used already")


def _the_backward(tree: ast.Module) -> ast.Call:
    found = [call for call in walk(tree, ast.Call) if is_method(call, "backward")]
    if not found:
        raise ConfigError("there is no loss.backward() in this cell, so no loop to rewrite. Nothing was changed")
    if len(found) > 1:
        raise unsure(found[1], "a second backward(); only loops with one loss and one optimizer are understood")
    if found[0].args or found[0].keywords:
        raise unsure(found[0], "backward() has arguments, whose meaning over many ranks is not clear")
    return found[0]


def _the_optimizer(scope: ast.Module | ast.FunctionDef) -> tuple[ast.Assign, str, str]:
    found = [(made, call) for made, call in _makers(scope).values() if _last_name(call.func) in _OPTIMIZERS]
    if not found:
        raise ConfigError("no optimizer of torch.optim is made beside the loop. Nothing was changed")
    if len(found) > 1:
        raise unsure(found[1][0], "a second optimizer; only loops with one are understood")
    made, call = found[0]
    first = call.args[0] if call.args else None
    if not (
        isinstance(first, ast.Call)
        and is_method(first, "parameters")
        and isinstance(first.func, ast.Attribute)
        and isinstance(first.func.value, ast.Name)
    ):
        raise unsure(made, "the optimizer's parameters are not those of one model, as in SGD(model.parameters(), ...)")
    name = _target(made)
    for step in _steps(scope, name):
        if step.args or step.keywords:
            raise unsure(step, f"{name}.step() has arguments: a closure is not understood")
    if not _steps(scope, name):
        raise unsure(made, f"there is no {name}.step()")
    return made, name, first.func.value.id


def _the_loader(loop: ast.For, scope: ast.Module | ast.FunctionDef) -> str:
    loaders = {name for name, (_, call) in _makers(scope).items() if _last_name(call.func) == "DataLoader"}
    over = loop.iter
    while isinstance(over, ast.Call) and _last_name(over.func) in _AROUND_LOADERS and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Name) or over.id not in loaders:
        raise unsure(
            loop,
            f"the loop goes over {ast.unparse(loop.iter)!r}, which is not one DataLoader made beside it, so nothing "
            "says how ranks share the rows",
        )
    return over.id


def _makers(scope: ast.Module | ast.FunctionDef) -> dict[str, tuple[ast.Assign, ast.Call]]:
    """Return the assignments of a call's value to a name, by name; the first of each."""
    found: dict[str, tuple[ast.Assign, ast.Call]] = {}
    for one in walk(scope, ast.Assign):
        if _target(one) and isinstance(one.value, ast.Call):
            found.setdefault(_target(one), (one, one.value))
    return found


def _refuse_attributes(scope: ast.AST, model: str, loader: str, loop: ast.For) -> None:
    for one in walk(scope, ast.Attribute):
        is_models = isinstance(one.value, ast.Name) and one.value.id == model
        if is_models and one.attr not in _OF_MODEL and one.lineno >= loop.lineno:
            raise unsure(one, f"{model}.{one.attr}: the wrapper of a distributed model has no such attribute")
        if isinstance(one.value, ast.Name) and one.value.id == loader and one.attr == "dataset":
            raise unsure(one, f"{loader}.dataset counts the rows of all ranks; count those of the batches instead")


def _refuse_elsewhere(tree: ast.Module, scope: ast.AST) -> None:
    inside = set(ast.walk(scope))
    for call in walk(tree, ast.Call):
        if call not in inside and (is_method(call, "state_dict") or ast.unparse(call.func) == "torch.save"):
            raise unsure(call, f"{ast.unparse(call)!r} is outside the function that trains, and may get its model")


def _steps(scope: ast.AST, name: str) -> list[ast.Call]:
    return [call for call in walk(scope, ast.Call) if ast.unparse(call.func) == f"{name}.step"]


def _target(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        [target] = statement.targets
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _above(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node
