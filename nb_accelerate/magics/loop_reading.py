"""Find the parts of a training loop in the source of a cell. Pure: nothing is run.

What is found is complete, or there is an error: a loop that is understood in part would be rewritten to one that trains
something else.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.loop_calls import (
    above,
    functions_of,
    is_method,
    last_name,
    local_names,
    own_nodes,
    parameters,
    target_of,
    the_call,
    unsure,
    walk,
)
from nb_accelerate.magics.loop_divisors import judge_totals
from nb_accelerate.magics.loop_loader import iterated, wrapped
from nb_accelerate.magics.loop_precision import read_precision, unscaled_loss
from nb_accelerate.magics.loop_refusals import (
    passes_on,
    refuse_attributes,
    refuse_elsewhere,
    refuse_names,
    refuse_second_loop,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.magics.loop_calls import Scope
    from nb_accelerate.magics.loop_precision import MixedPrecision
    from nb_accelerate.magics.loop_totals import Totals

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

_LOOPS = (ast.For, ast.While)

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


@dataclass(frozen=True)
class TrainingLoop:
    """The parts of a loop; every node is one of `tree`.

    Attributes:
        tree: of the cell.
        outer: the function that makes model, optimizer and loader, or the cell; None if another cell makes them.
        scope: that the loop is in: `outer`, or a function that gets them.
        names: of each scope that uses model, optimizer, loader or a scheduler: the names of `outer` by those there.
        loop: over the batches.
        backward: the call of ``loss.backward()``.
        model, optimizer, loader: their names in `outer`.
        schedulers: names of those that step with each batch.
        prepare_after: the last statement that makes one of them; None if another cell makes them.
        own_loss: the name whose ``backward`` is called; empty for an expression.
        epoch_schedulers: names of those that step once for each epoch.
        precision: its autocast blocks and its GradScaler.
        totals: what it adds up.
        judged: what is to be said about the totals, and the nodes that divide those of all ranks.
    """

    tree: ast.Module
    outer: Scope | None
    scope: Scope
    names: Mapping[Scope, Mapping[str, str]]
    loop: ast.For
    backward: ast.Call
    model: str
    optimizer: str
    loader: str
    schedulers: tuple[str, ...]
    prepare_after: ast.stmt | None
    own_loss: str
    epoch_schedulers: tuple[str, ...]
    precision: MixedPrecision
    totals: Totals
    judged: tuple[list[str], set[ast.AST]]


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
    refuse_names(tree)
    backward = _the_backward(tree)
    function = next((one for one in above(backward, parents) if isinstance(one, _SCOPES)), None)
    if function is not None and (not isinstance(function, ast.FunctionDef) or parents[function] is not tree):
        raise unsure(function, "the loop is in a class, or in a function inside another one; write it out in the cell")
    scope: Scope = function or tree
    loop = next((one for one in above(backward, parents) if isinstance(one, _LOOPS)), None)
    if not isinstance(loop, ast.For):
        raise unsure(backward, "backward() is not in a for loop over batches")
    outer, called = _the_outer(scope, tree)
    if outer is None:
        assert isinstance(scope, ast.FunctionDef)
        return _read_function(scope, tree, loop, backward)
    optimizer_made, optimizer, model = _the_optimizer(outer)
    made = _makers(outer)
    scheduler_names = [
        name
        for name, (_, call) in made.items()
        if "lr_scheduler" in ast.unparse(call.func)
        or last_name(call.func).endswith("LR")
        or any(ast.unparse(one) == optimizer for one in call.args[:1])  # get_linear_schedule_with_warmup(optimizer)
    ]
    loaders = [name for name, (_, call) in made.items() if last_name(call.func) == "DataLoader"]
    scalers = _grad_scalers(outer)
    everything = local_names(scope, outer, tree, [model, optimizer, *loaders, *scheduler_names, *scalers])
    if scope is not outer:
        scalers |= (own := _grad_scalers(scope))
        everything[scope].update({name: name for name in own})
    loader = everything[scope].get(iterated(loop, scope), "")
    if not loader or loader not in loaders:
        raise unsure(
            loop,
            f"the loop goes over {ast.unparse(loop.iter)!r}, which is not one DataLoader made beside it, so nothing "
            "says how ranks share the rows",
        )
    shared = (model, optimizer, loader, *scheduler_names, *scalers)
    names = {
        where: {here: there for here, there in one.items() if there in shared} for where, one in everything.items()
    }
    scaler, scaler_made = next(iter(scalers.items()), ("", None))
    precision = read_precision(
        tree,
        names,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        scaler_made=scaler_made,
        loop=loop,
        backward=backward,
    )
    _check_steps(names, optimizer, optimizer_made, scaler)
    stepping = {name: [step for where, step in _steps(names, name)] for name in scheduler_names}
    with_batches = tuple(name for name, steps in stepping.items() if any(loop in above(s, parents) for s in steps))
    by_name = [*([made[model][0]] if model in made else []), optimizer_made, made[loader][0]]
    by_name += [made[name][0] for name in with_batches]
    # An assignment such as `model = model.to(device)` makes the model too.
    by_name += [
        one for one in outer.body if isinstance(one, ast.Assign) and target_of(one) in (model, optimizer, loader)
    ]
    for statement in by_name:
        if statement not in outer.body:
            raise unsure(statement, f"{ast.unparse(statement)!r} is inside a loop or a branch, so it may be made twice")
    last = max(by_name, key=lambda one: one.lineno)
    used = [called or loop, *(wrapped(loop, scope) if scope is outer else ())]
    first = min((one for one in outer.body if any(node in ast.walk(one) for node in used)), key=lambda one: one.lineno)
    if last.lineno >= first.lineno:
        raise unsure(last, f"{target_of(last)!r} is assigned again after the loop has begun")
    if model not in made and not any(target_of(one) == model for one in outer.body):
        raise unsure(optimizer_made, f"{model!r} is not made in this {'function' if outer is not tree else 'cell'}")
    unprepared = {one for one in own_nodes(outer) if isinstance(one, ast.Name) and one.lineno <= last.lineno}
    totals, judged = judge_totals(tree, scope, names[scope], loop, _own_loss(backward), model, loader, unprepared)
    for where, one in names.items():
        begin = 0 if where is not outer else loop.lineno if scope is outer else first.lineno
        refuse_attributes(where, one, model, loader, begin, parents, judged[1])
        if where in (outer, scope):
            refuse_second_loop(where, one, loader, loop, 0 if where is not outer else last.lineno)
        elif loader in one.values() and not passes_on(where, one, loader, functions_of(tree)):
            raise unsure(where, f"{where.name} reads {loader} too, and would see the rows of one rank only")  # type: ignore[union-attr]
    refuse_elsewhere(tree, names)
    return TrainingLoop(
        tree=tree,
        outer=outer,
        scope=scope,
        names=names,
        loop=loop,
        backward=backward,
        model=model,
        optimizer=optimizer,
        loader=loader,
        schedulers=with_batches,
        prepare_after=last,
        own_loss=_own_loss(backward),
        epoch_schedulers=tuple(name for name, steps in stepping.items() if steps and name not in with_batches),
        precision=precision,
        totals=totals,
        judged=judged,
    )


def _the_outer(scope: Scope, tree: ast.Module) -> tuple[Scope | None, ast.Call | None]:
    """Return the scope that makes the optimizer, and the call there that leads to the loop.

    The scope is None if the loop's function is not called in the cell.
    """
    called: ast.Call | None = None
    outer = scope
    while isinstance(outer, ast.FunctionDef) and not _optimizers(outer):
        found = the_call(outer, tree)
        if found is None:
            if outer is not scope:
                raise unsure(outer, f"no optimizer of torch.optim is made in this cell, and nothing calls {outer.name}")
            return None, None
        if found[1] is outer:
            raise unsure(found[0], f"{outer.name} calls itself")
        called, outer = found
    return outer, called


def _read_function(function: ast.FunctionDef, tree: ast.Module, loop: ast.For, backward: ast.Call) -> TrainingLoop:
    """Read a function that gets all it trains as arguments, alone in its cell."""
    own = [one.arg for one in parameters(function)]
    called = {one.func.id for one in walk(function, ast.Call) if isinstance(one.func, ast.Name)}
    scalers = _grad_scalers(function)
    scaler = next(iter(scalers), "")
    backward_of = ast.unparse(backward.func.value)  # type: ignore[attr-defined]
    if unscaled_loss(backward) is not backward.func.value:  # type: ignore[attr-defined]
        scaler = backward_of.partition(".")[0]
    methods = {
        name: {one.attr for one in walk(function, ast.Attribute) if ast.unparse(one.value) == name} for name in own
    }
    stepped = {ast.unparse(one) for call in _calls_of(function, f"{scaler}.step") for one in call.args}
    optimizers = [name for name in own if "zero_grad" in methods[name] and ("step" in methods[name] or name in stepped)]
    models = [name for name in own if name in called and methods[name] & {"train", "parameters", "zero_grad"}]
    loader = iterated(loop, function)
    if loader not in own:
        raise unsure(loop, f"the loop goes over {ast.unparse(loop.iter)!r}, which is no argument of {function.name}")
    for kind, found, how in (
        ("optimizer", optimizers, "one argument with step() and zero_grad()"),
        ("model", models, "one argument that is called and has train() or parameters()"),
    ):
        if len(found) != 1:
            raise unsure(function, f"which argument of {function.name} is the {kind} is not sure: there must be {how}")
    [optimizer], [model] = optimizers, models
    for one in walk(function, ast.Name):
        if one.id in (model, optimizer, loader) and isinstance(one.ctx, ast.Store):
            raise unsure(one, f"{one.id!r} is assigned again in a function that gets it")
    known = [model, optimizer, loader, *([scaler] if scaler in own or scaler in scalers else [])]
    names: dict[Scope, dict[str, str]] = {function: {name: name for name in known}}
    precision = read_precision(
        tree,
        names,
        model=model,
        optimizer=optimizer,
        scaler=scaler if scaler in known else "",
        scaler_made=scalers.get(scaler),
        loop=loop,
        backward=backward,
    )
    _check_steps(names, optimizer, function, scaler)
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    totals, judged = judge_totals(tree, function, names[function], loop, _own_loss(backward), model, loader, ())
    refuse_attributes(function, names[function], model, loader, 0, parents, judged[1])
    refuse_second_loop(function, names[function], loader, loop, 0)
    refuse_elsewhere(tree, names)
    others = [name for name in own if name not in (optimizer, scaler) and "step" in methods[name]]
    steps = [step for name in others for step in walk(function, ast.Call) if ast.unparse(step.func) == f"{name}.step"]
    with_batches = {ast.unparse(s.func.value) for s in steps if s in ast.walk(loop)}  # type: ignore[attr-defined]
    return TrainingLoop(
        tree=tree,
        outer=None,
        scope=function,
        names=names,
        loop=loop,
        backward=backward,
        model=model,
        optimizer=optimizer,
        loader=loader,
        schedulers=tuple(name for name in others if name in with_batches),
        prepare_after=None,
        own_loss=_own_loss(backward),
        epoch_schedulers=tuple(name for name in others if name not in with_batches),
        precision=precision,
        totals=totals,
        judged=judged,
    )


def _the_backward(tree: ast.Module) -> ast.Call:
    found = [call for call in walk(tree, ast.Call) if is_method(call, "backward")]
    if not found:
        raise ConfigError(
            "there is no loss.backward() in this cell, so no loop to rewrite; a function that has it and its call are "
            "rewritten together, in one cell. Nothing was changed"
        )
    if len(found) > 1:
        raise unsure(found[1], "a second backward(); only loops with one loss and one optimizer are understood")
    if found[0].args or found[0].keywords:
        raise unsure(found[0], "backward() has arguments, whose meaning over many ranks is not clear")
    return found[0]


def _own_loss(backward: ast.Call) -> str:
    loss = unscaled_loss(backward)
    return loss.id if isinstance(loss, ast.Name) else ""


def _grad_scalers(scope: Scope) -> dict[str, ast.Assign]:
    """Return the statements of a scope that make a GradScaler, by its name."""
    return {name: made for name, (made, call) in _makers(scope).items() if last_name(call.func) == "GradScaler"}


def _optimizers(scope: Scope) -> list[tuple[ast.Assign, ast.Call]]:
    return [(made, call) for made, call in _makers(scope).values() if last_name(call.func) in _OPTIMIZERS]


def _the_optimizer(scope: Scope) -> tuple[ast.Assign, str, str]:
    found = _optimizers(scope)
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
    return made, target_of(made), first.func.value.id


def _check_steps(names: Mapping[Scope, Mapping[str, str]], optimizer: str, made: ast.stmt, scaler: str) -> None:
    steps = [step for _, step in _steps(names, optimizer)]
    if scaler and _steps(names, scaler):  # whose argument was looked at already
        if steps:
            raise unsure(steps[0], f"{optimizer} is stepped by itself and by {scaler}")
        return
    for step in steps:
        if step.args or step.keywords:
            raise unsure(step, f"{ast.unparse(step.func)}() has arguments: a closure is not understood")
    if not steps:
        raise unsure(made, f"there is no {optimizer}.step()")


def _makers(scope: Scope) -> dict[str, tuple[ast.Assign, ast.Call]]:
    """Return the assignments of a call's value to a name, by name; the first of each."""
    found: dict[str, tuple[ast.Assign, ast.Call]] = {}
    for one in own_nodes(scope):
        if isinstance(one, ast.Assign) and target_of(one) and isinstance(one.value, ast.Call):
            found.setdefault(target_of(one), (one, one.value))
    return found


def _calls_of(scope: Scope, function: str) -> list[ast.Call]:
    return [one for one in own_nodes(scope) if isinstance(one, ast.Call) and ast.unparse(one.func) == function]


def _steps(names: Mapping[Scope, Mapping[str, str]], stepping: str) -> list[tuple[Scope, ast.Call]]:
    return [
        (scope, call)
        for scope, local in names.items()
        for call in own_nodes(scope)
        if isinstance(call, ast.Call)
        and is_method(call, "step")
        and local.get(ast.unparse(call.func.value)) == stepping  # type: ignore[attr-defined]
    ]
