"""Judge what is done with the totals of a loop: a number that would be too small on many ranks is refused. Pure.

A total over all ranks is divided by the rows of all ranks, and one over the batches of a rank by the number of them.
"""

from __future__ import annotations

import ast
from enum import Enum
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import is_method, last_name, own_nodes, target_of, unsure, walk
from nb_accelerate.magics.loop_refusals import SHOWING
from nb_accelerate.magics.loop_totals import Kind, read_totals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from nb_accelerate.magics.loop_calls import Scope
    from nb_accelerate.magics.loop_totals import Total, Totals

_PASSED = frozenset({"sum", "float", "int", "round", "item", "detach", "cpu", "double", "sqrt"})
"""Calls through which a total is followed."""

_COLLECTING = frozenset({"update", "add", "add_batch"})
"""Methods that give an object of the user numbers of a batch."""

_REPEATED = (
    "rows that are repeated to fill the last batches are left out of these sums, but in the mean loss of their batch"
)


_MEANING = {
    Kind.ROWS: "of all ranks; do not divide it by batches",
    Kind.BATCHES: "a sum over the batches of one rank; divide it by their number, the length of the loader",
    Kind.RANK: "a sum over the rows of one rank; accelerator.reduce(torch.tensor(...), 'sum') is that of all",
}
"""What is to be known of a total before it is used."""


class Divisor(Enum):
    """What a divisor counts."""

    ALL = "rows of all ranks"
    RANK = "rows or batches of one rank"
    FIXED = "a number that the loop does not change"
    UNKNOWN = "what another cell or a call says"
    MIXED = "several of these"


class Judge:
    """What a cell does with the totals of its loop.

    Args:
        totals: of the loop.
        tree: of the cell.
        scope: that the loop is in.
        loop: over the batches.
        loader: its name in the scope.
        own_loss: name of the loss whose gradients are computed; empty if it has none.
        outer_loader: name of the loader where it is made.
        unprepared: names above the line that prepares the loader, whose length is that of all batches there.
    """

    def __init__(
        self,
        totals: Totals,
        tree: ast.Module,
        scope: Scope,
        loop: ast.For,
        loader: str,
        own_loss: str,
        *,
        outer_loader: str,
        unprepared: Collection[ast.AST],
    ) -> None:
        self._outer_loader = outer_loader
        self._unprepared = unprepared
        self._own_loss = own_loss
        self._totals = totals
        self._tree = tree
        self._scope = scope
        self._loop = loop
        self._loader = loader
        self._parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        self._nodes = list(own_nodes(scope))
        self._in_loop = set(ast.walk(loop))
        self.divisors: set[ast.AST] = set()
        """Nodes in divisors of totals over the rows of all ranks."""

    def judge(self) -> list[str]:
        """Return notes, one line each.

        Raises:
            ConfigError: a number would be wrong on many ranks; says what to write.
        """
        notes: list[str] = []
        if self._totals.with_losses:
            notes.append(f"line {self._totals.with_losses[0].lineno} of this cell: {_REPEATED}")
        for total in self._totals.found.values():
            if total.kind is not Kind.COUNT:
                notes += self._notes_on(total)
        self.divisors |= self._definitions_of_divisors()
        for call in (one.value for one in walk(self._loop, ast.Expr)):
            if isinstance(call, ast.Call) and last_name(call.func) in _COLLECTING and self._is_of_batch(call):
                notes.append(f"line {call.lineno} of this cell: {ast.unparse(call.func)} gets this rank's rows only")
        return list(dict.fromkeys(notes))

    def _notes_on(self, total: Total) -> Iterator[str]:
        items = [call for call in walk(total.added[0], ast.Call) if is_method(call, "item")]
        has_note = any(ast.unparse(call.func) != f"{self._own_loss}.item" for call in items)
        if total.kind is Kind.RANK and not has_note:
            yield f"line {total.added[0].lineno} of this cell: {total.name} is of this rank's rows only"
        if total.divisor is not None:
            yield from self._judge_divided(total, total.divisor)
            return
        done = 0
        uses = sorted(self._uses(total), key=lambda one: (one[0].lineno, one[0].col_offset))
        if not uses and not total.is_list:  # another cell uses it, or what it is a part of is used
            yield f"line {total.added[0].lineno} of this cell: {total.name} is {_MEANING[total.kind]}"
        for node, divided in uses:
            if done and node.lineno > done:  # it is the divided number from there on
                break
            if divided is None:
                yield from self._judge_whole(total, node)
            else:
                done = max(done, self._done_at(node, total))
                yield from self._judge_divided(total, divided)

    def _done_at(self, node: ast.expr, total: Total) -> int:
        """Return the line that puts the divided number in the total's place; 0 if it does not."""
        while not isinstance(node, ast.stmt):
            node = self._parents[node]  # type: ignore[assignment]
        is_it = isinstance(node, ast.AugAssign) and ast.unparse(node.target) == total.name
        return node.lineno if is_it or target_of(node) == total.name else 0

    def _uses(self, total: Total) -> Iterator[tuple[ast.expr, ast.expr | None]]:
        """Yield where a total is used, and what it is divided by there."""
        own = {node for statement in total.added for node in ast.walk(statement)}
        end = self._line_of_new_start(total)
        for node in self._nodes:
            if node in own or not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            if ast.unparse(node) != total.name or (end and node.lineno >= end):
                continue
            parent = self._parents[node]
            if isinstance(node.ctx, ast.Load):
                yield self._use(node)
            elif isinstance(parent, ast.AugAssign) and isinstance(parent.op, ast.Div):
                yield node, parent.value

    def _line_of_new_start(self, total: Total) -> int:
        """Return the line after the loop that sets a total back, for another loop say; 0 if none does."""
        block: list[ast.stmt] = getattr(self._parents[self._loop], "body", [])
        for one in block[block.index(self._loop) + 1 :] if self._loop in block else ():
            if isinstance(one, ast.Assign) and total.name not in map(ast.unparse, walk(one.value, ast.expr)):
                names = [ast.unparse(name) for target in one.targets for name in walk(target, ast.expr)]
                if total.name in names:
                    return one.lineno
        return 0

    def _use(self, node: ast.expr) -> tuple[ast.expr, ast.expr | None]:
        here: ast.AST = node
        while True:
            parent = self._parents[here]
            if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div) and parent.left is here:
                return node, parent.right
            is_factor = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult)
            is_passed = isinstance(parent, ast.Call) and last_name(parent.func) in _PASSED
            is_method_of = isinstance(parent, ast.Attribute) and parent.attr in _PASSED
            if not (is_factor or is_passed or is_method_of):
                return node, None
            here = parent

    def _judge_divided(self, total: Total, divisor: ast.expr) -> Iterator[str]:
        of = self._counts(divisor)
        text = ast.unparse(self._parents[divisor])
        is_window = total.is_window and divisor in self._in_loop
        if total.kind is Kind.ROWS:
            if of in (Divisor.RANK, Divisor.MIXED) or (is_window and of in (Divisor.FIXED, Divisor.UNKNOWN)):
                raise unsure(
                    divisor,
                    f"{text!r} would be too large: {total.name} becomes that of all ranks, and the divisor does not. "
                    f"Divide by len({self._loader}.dataset), or by rows that are added up in the loop with len(x)",
                )
            self.divisors |= set(ast.walk(divisor))
            if of is Divisor.UNKNOWN:
                yield (
                    f"line {divisor.lineno} of this cell: {total.name} is of all ranks, so "
                    f"{ast.unparse(divisor)} has to count the rows of all ranks"
                )
        elif of is not Divisor.RANK and not (is_window and of in (Divisor.FIXED, Divisor.UNKNOWN)):
            raise unsure(divisor, self._too_small(total, text))

    def _judge_whole(self, total: Total, node: ast.expr) -> Iterator[str]:
        parents = []
        here: ast.AST = node
        while here in self._parents and not isinstance(here, ast.stmt):
            here = self._parents[here]
            parents.append(here)
        if any(isinstance(one, ast.Compare) for one in parents) or (total.is_window and node in self._in_loop):
            return
        is_shown = any(isinstance(one, ast.Call) and last_name(one.func) in SHOWING for one in parents)
        is_length = any(isinstance(one, ast.Call) and ast.unparse(one.func) == "len" for one in parents)
        is_summed = any(isinstance(one, ast.Call) and last_name(one.func) == "sum" for one in parents)
        if is_length or (total.is_list and not is_summed and total.kind is Kind.BATCHES):
            return
        if total.kind is Kind.ROWS:
            if not is_shown or total.is_list:
                yield f"line {node.lineno} of this cell: {total.name} is {_MEANING[Kind.ROWS]}"
        elif not total.is_list or is_summed:
            raise unsure(node, self._too_small(total, ast.unparse(node)))

    def _too_small(self, total: Total, text: str) -> str:
        head = f"{text!r} would be too small by the number of ranks, because {total.name} is of the batches of one rank"
        if total.kind is Kind.BATCHES:
            whole = f"sum({total.name})" if total.is_list else total.name
            return (
                f"{head}. Write {whole} / len({self._loader}), or add up loss.item() * len(x), with the rows of a batch"
            )
        return (
            f"{head}. Take the line out, and in the new cell divide "
            f"accelerator.reduce(torch.tensor({total.name}, device=accelerator.device), 'sum')"
        )

    def _counts(self, value: ast.expr) -> Divisor:
        """Return what a divisor counts."""
        found = self._counted(value, frozenset()) - {Divisor.FIXED}
        if not found:
            return Divisor.FIXED
        return next(iter(found)) if len(found) == 1 else Divisor.MIXED

    def _counted(self, value: ast.AST, seen: frozenset[str]) -> set[Divisor]:
        name = ast.unparse(value) if isinstance(value, ast.expr) else ""
        if name in self._totals.found:
            total = self._totals.found[name]
            return {Divisor.ALL if total.kind is Kind.ROWS and not total.is_list else Divisor.RANK}
        if name == f"{self._loader}.dataset":
            return {Divisor.ALL}
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("len", "max", "min", "float", "int"):
            if ast.unparse(value.func) == "len" and isinstance(value.args[0], ast.Name):
                return {self._length(value.args[0])}
            return set().union(*(self._counted(one, seen) for one in value.args))
        if isinstance(value, ast.Name):
            return self._counted_by_name(value.id, seen)
        if name == f"{self._loader}.batch_size" or isinstance(value, ast.Constant):
            return {Divisor.FIXED}
        if name.endswith((".shape[0]", ".size(0)")) and not self._is_of_batch(value):
            return {Divisor.FIXED}
        return set().union(*(self._counted(one, seen) for one in ast.iter_child_nodes(value)))

    def _length(self, value: ast.Name) -> Divisor:
        """Return what the length of a name counts."""
        name = value.id
        if name in (self._loader, self._outer_loader):
            return Divisor.MIXED if value in self._unprepared else Divisor.RANK
        if name in self._totals.of_batch or name in self._totals.found:
            return Divisor.RANK
        values = [one.value for one in self._definitions(name)]
        if any(ast.unparse(one) == f"{self._loader}.dataset" for one in values):
            return Divisor.ALL
        is_bar = any(
            isinstance(one, ast.Call) and [*map(ast.unparse, one.args[:1])] == [self._loader] for one in values
        )
        return Divisor.RANK if is_bar else Divisor.FIXED

    def _counted_by_name(self, name: str, seen: frozenset[str]) -> set[Divisor]:
        if name in self._totals.of_batch or name in self._totals.index:
            return {Divisor.RANK}
        if name == self._loader:
            return {Divisor.MIXED}
        made = self._definitions(name)
        if not made or name in seen:
            return {Divisor.UNKNOWN}
        return set().union(*(self._counted(one.value, seen | {name}) for one in made))

    def _is_of_batch(self, value: ast.AST) -> bool:
        own = {self._loader, *self._totals.of_batch, *self._totals.found}
        return any(one.id in own for one in walk(value, ast.Name))

    def _definitions(self, name: str) -> list[ast.Assign]:
        """Return what assigns a name in the scope of the loop, or in the cell."""
        here = [one for one in self._nodes if isinstance(one, ast.Assign) and target_of(one) == name]
        if here or isinstance(self._scope, ast.Module) or any(one.arg == name for one in walk(self._scope, ast.arg)):
            return here
        return [one for one in self._tree.body if isinstance(one, ast.Assign) and target_of(one) == name]

    def _definitions_of_divisors(self) -> set[ast.AST]:
        """Return the nodes of values whose name does nothing but divide."""
        nodes: set[ast.AST] = set()
        for made in walk(self._tree, ast.Assign):
            uses = [
                one for one in walk(self._tree, ast.Name) if one.id == target_of(made) and isinstance(one.ctx, ast.Load)
            ]
            if uses and self.divisors.issuperset(uses):
                nodes |= set(ast.walk(made.value))
        return nodes


def judge_totals(
    tree: ast.Module,
    scope: Scope,
    names: Mapping[str, str],
    loop: ast.For,
    own_loss: str,
    model: str,
    loader: str,
    unprepared: Collection[ast.AST],
) -> tuple[Totals, tuple[list[str], set[ast.AST]]]:
    """Return what the loop adds up, notes on it, and the nodes that divide numbers of all ranks.

    Args:
        tree: of the cell.
        scope: that the loop is in.
        names: in the scope, with those that the same objects have where they are made.
        loop: over the batches.
        own_loss: the name whose ``backward`` is called; empty for an expression.
        model: its name where it is made.
        loader: its name where it is made.
        unprepared: nodes in which the loader is not prepared yet.

    Raises:
        ConfigError: a number would be wrong on many ranks; says what to write.
    """
    _refuse_sum(tree, loop, own_loss)
    totals = read_totals(loop, own_loss, _local_name(names, model))
    here = _local_name(names, loader)
    judge = Judge(totals, tree, scope, loop, here, own_loss, outer_loader=loader, unprepared=unprepared)
    return totals, (judge.judge(), judge.divisors)


def _refuse_sum(tree: ast.Module, loop: ast.For, own_loss: str) -> None:
    """Raise the error for a loss that is a sum over rows: gradients are averaged over ranks, and so is the loss."""
    why = "the loss is a sum over rows, but ranks average gradients and losses. Write the mean of the rows instead"
    for call in walk(tree, ast.Call):
        is_sum = any(one.arg == "reduction" and ast.unparse(one.value) == "'sum'" for one in call.keywords)
        if is_sum and (call in ast.walk(loop) or (last_name(call.func)[:1].isupper() and _may_train(call, tree, loop))):
            raise unsure(call, why)
    for made in walk(loop, ast.Assign):
        if own_loss and target_of(made) == own_loss and isinstance(made.value, ast.Call):
            function = made.value.func
            is_torch = ast.unparse(function) == "torch.sum" and len(made.value.args) == 1
            if is_torch or (is_method(made.value, "sum") and not made.value.args and not made.value.keywords):
                raise unsure(made, why)


def _may_train(call: ast.Call, tree: ast.Module, loop: ast.For) -> bool:
    """Whether the loop uses what a call makes, or a function gets it that may be the one with the loop."""
    names = {target_of(one) for one in walk(tree, ast.Assign) if one.value is call}
    given = [value for one in walk(tree, ast.Call) for value in (*one.args, *(named.value for named in one.keywords))]
    uses = [*walk(loop, ast.Name), *(one for one in given if isinstance(one, ast.Name))]
    return not names or any(one.id in names for one in uses)


def _local_name(names: Mapping[str, str], name: str) -> str:
    """Return the name in a scope of what has another one where it is made."""
    return next((here for here, there in names.items() if there == name), name)
