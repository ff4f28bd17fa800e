"""Find the numbers that a loop over batches adds up, and make them those of all ranks. Pure: nothing is run.

A prepared loader gives each rank its own batches, so what a rank adds up is smaller than what one process does. Counts
of right predictions, losses times rows, and numbers of rows are added up over all ranks, without repeated rows.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import is_method, last_name, target_of, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.magics.loop_edits import Edits

_CASTS = frozenset({"float", "double", "int", "long", "type", "to", "cpu", "detach"})
"""Methods that keep the entries of a tensor."""


_RESHAPING = frozenset(
    {"view", "reshape", "flatten", "ravel", "masked_select", "transpose", "permute", "t", "cat", "repeat_interleave"}
)
"""Functions after which the first dimension of a tensor may be another one than that of the rows."""

_ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Kind(Enum):
    """What a total adds up."""

    ROWS = "a number for the rows of all ranks"
    BATCHES = "the mean loss of each step over all ranks"
    RANK = "a number for the rows of one rank"
    COUNT = "something that does not depend on the rows"


@dataclass
class Total:
    """A number that grows in the loop.

    Attributes:
        name: source of what it is assigned to.
        kind: what it adds up.
        added: the statements that add to it.
        is_list: the numbers are appended to a list.
        is_window: the loop itself sets it back.
        divisor: what each number is divided by before it is added.
    """

    name: str
    kind: Kind
    added: list[ast.stmt]
    is_list: bool = False
    is_window: bool = False
    divisor: ast.expr | None = None


@dataclass(frozen=True)
class Totals:
    """What a loop adds up, and the changes that make it of all ranks.

    Attributes:
        found: totals by name.
        of_batch: names in the loop whose values depend on the batch.
        index: names of the number of a batch, by enumerate.
        replaced: expressions and their new text.
        wrapped: expressions with one entry for each row, which become those of all ranks.
        with_losses: the first statement that adds up losses times rows.
    """

    found: dict[str, Total] = field(default_factory=dict)
    of_batch: frozenset[str] = frozenset()
    index: frozenset[str] = frozenset()
    replaced: list[tuple[ast.expr, str]] = field(default_factory=list)
    wrapped: list[ast.expr] = field(default_factory=list)
    with_losses: list[ast.stmt] = field(default_factory=list)

    def apply(self, edits: Edits) -> None:
        """Make the changes in the source of the cell."""
        for node, text in self.replaced:
            edits.replace(node, text)
        for node in self.wrapped:
            edits.wrap(node, "accelerator.gather_for_metrics")

    def has_changed(self, node: ast.AST) -> bool:
        """Whether a node is, holds or is in something that becomes of all ranks."""
        changed = [*(one for one, _ in self.replaced), *self.wrapped]
        return any(node in ast.walk(one) or one in ast.walk(node) for one in changed)


def runs_on_all_ranks(node: ast.AST, loop: ast.For) -> bool:
    """Whether nothing but loops stands between a node and the loop over batches, so that a collective may be there."""
    branches = [one for one in ast.walk(loop) if isinstance(one, (ast.If, ast.IfExp, ast.Try, ast.BoolOp))]
    return node in ast.walk(loop) and not any(node in ast.walk(one) for one in branches)


def read_totals(loop: ast.For, own_loss: str, model: str) -> Totals:
    """Find the totals of a loop.

    Args:
        loop: over the batches.
        own_loss: name of the loss whose gradients are computed; empty if it has none.
        model: its name in the loop.
    """
    return _Reader(loop, own_loss, model).read()


def _additions(loop: ast.For) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr, bool]]:
    """Yield statements that add to something, to what, what they add, and whether they put it in a list."""
    for one in walk(loop, ast.stmt):
        if isinstance(one, ast.AugAssign) and isinstance(one.op, (ast.Add, ast.Sub)):
            is_list = isinstance(one.value, ast.List) and len(one.value.elts) == 1
            yield one, one.target, one.value.elts[0] if is_list else one.value, is_list  # type: ignore[attr-defined]
        elif isinstance(one, ast.Assign) and len(one.targets) == 1:
            for target, value in _assigned(one.targets[0], one.value):
                if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                    sides = {ast.unparse(value.left): value.right, ast.unparse(value.right): value.left}
                    if ast.unparse(target) in sides:
                        yield one, target, sides[ast.unparse(target)], False
        elif isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and len(one.value.args) == 1:
            function = one.value.func
            if isinstance(function, ast.Attribute) and function.attr in ("append", "extend"):
                yield one, function.value, one.value.args[0], True


def _assigned(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


class _Reader:
    def __init__(self, loop: ast.For, own_loss: str, model: str) -> None:
        self._loop = loop
        self._own_loss = own_loss
        self._made = self._assigned_once()
        target = loop.target
        is_counted = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "enumerate"
        if is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            index, target = target.elts
            self._index = frozenset(one.id for one in walk(index, ast.Name))
        else:
            self._index = frozenset()
        self._of_batch = self._depending({model, *(one.id for one in walk(target, ast.Name))})
        self._totals = Totals(of_batch=self._of_batch, index=self._index)

    def read(self) -> Totals:
        """Find the totals."""
        found = self._totals.found
        for statement, target, added, is_list in _additions(self._loop):
            name = ast.unparse(target)
            value, divisor = _fraction(added)
            kind = self._kind(statement, value)
            if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Sub) and kind is not Kind.COUNT:
                kind = Kind.RANK
            if name in found:
                found[name].added.append(statement)
                is_alike = kind is found[name].kind and divisor is found[name].divisor is None
                found[name].kind = kind if is_alike else Kind.RANK
            else:
                found[name] = Total(name, kind, [statement], is_list, divisor=divisor)
        for one in walk(self._loop, ast.Assign):
            for name in (ast.unparse(name) for target in one.targets for name in _parts(target)):
                if name in found and one not in found[name].added:
                    found[name].is_window = True
        return self._totals

    def _assigned_once(self) -> dict[str, ast.Assign]:
        made = [one for one in walk(self._loop, ast.Assign) if target_of(one)]
        stored = [one.id for one in walk(self._loop, ast.Name) if isinstance(one.ctx, ast.Store)]
        return {target_of(one): one for one in made if stored.count(target_of(one)) == 1}

    def _depending(self, names: set[str]) -> frozenset[str]:
        """Return the names, and those that the loop assigns something made of them."""
        size = 0
        while size != len(names):
            size = len(names)
            for one in walk(self._loop, ast.Assign):
                if any(name.id in names for name in walk(one.value, ast.Name)):
                    names |= {
                        name.id for target in one.targets for name in _parts(target) if isinstance(name, ast.Name)
                    }
        return frozenset(names)

    def _kind(self, statement: ast.stmt, value: ast.expr) -> Kind:
        """Return what a statement adds, and note how that becomes of all ranks."""
        if not any(name.id in {*self._of_batch, self._own_loss} for name in walk(value, ast.Name)):
            return Kind.COUNT
        if not runs_on_all_ranks(statement, self._loop):
            return Kind.RANK
        if self._is_item_of_loss(self._definition(value)):
            return Kind.BATCHES
        value = self._only_use(value)
        rows = self._rows_beside_loss(value)
        if rows is not None:
            is_number = any(last_name(call.func) in ("item", "float") for call in self._calls(value))
            one_for_each = f"{self._own_loss}.detach().repeat({ast.unparse(rows)})"
            text = f"accelerator.gather_for_metrics({one_for_each}).sum(){'.item()' if is_number else ''}"
            self._totals.replaced.append((value, text))
            self._totals.with_losses.append(statement)
            return Kind.ROWS
        batch = self._batch_of_rows(value)
        if batch is not None:
            one_for_each = f"{ast.unparse(batch)}.new_ones({ast.unparse(value)})"
            self._totals.replaced.append((value, f"len(accelerator.gather_for_metrics({one_for_each}))"))
            return Kind.ROWS
        counted = _counted(value)
        if counted is not None and not self._reshapes(counted):
            self._totals.wrapped.append(counted)
            return Kind.ROWS
        return Kind.RANK

    def _calls(self, value: ast.expr) -> list[ast.Call]:
        """Return the calls in a value and in what its names stand for."""
        made = [self._definition(name) for name in walk(value, ast.Name)]
        return [call for one in (value, *made) for call in walk(one, ast.Call)]

    def _reshapes(self, value: ast.expr) -> bool:
        """Whether a value may have other entries than one for each row, such as one for each token of a mask."""
        made = [one for one in walk(self._loop, ast.Assign) if target_of(one)]
        names = {name.id for name in walk(value, ast.Name)}
        values = [value, *(one.value for one in made if target_of(one) in names)]
        calls = {last_name(call.func) for one in values for call in walk(one, ast.Call)}
        slices = [part.slice for one in values for part in walk(one, ast.Subscript)]
        return bool(calls & _RESHAPING) or any(isinstance(one, (ast.Name, ast.Compare)) for one in slices)

    def _definition(self, value: ast.expr) -> ast.expr:
        """Return what a name stands for that the loop assigns once, on all ranks."""
        made = self._made.get(value.id) if isinstance(value, ast.Name) else None
        return made.value if made is not None and runs_on_all_ranks(made, self._loop) else value

    def _only_use(self, value: ast.expr) -> ast.expr:
        """Return what a name stands for, if nothing else uses it, so that it may be changed."""
        if isinstance(value, ast.Name):
            loads = [one for one in walk(self._loop, ast.Name) if one.id == value.id and isinstance(one.ctx, ast.Load)]
            return self._definition(value) if len(loads) == 1 and self._batch_of_rows(value) is None else value
        return value

    def _is_item_of_loss(self, value: ast.expr) -> bool:
        """Whether a value is ``loss.item()``, which becomes the mean of all ranks."""
        return bool(self._own_loss) and ast.unparse(value) == f"{self._own_loss}.item()"

    def _is_loss(self, value: ast.expr) -> bool:
        """Whether a value is the loss, as a number or a tensor."""
        if isinstance(value, ast.Call) and last_name(value.func) == "float" and len(value.args) == 1:
            value = value.args[0]
        while (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and value.func.attr in ("item", "detach", "cpu")
            and not value.args
        ):
            value = value.func.value
        if isinstance(value, ast.Attribute) and value.attr == "data":
            value = value.value
        return bool(self._own_loss) and ast.unparse(value) == self._own_loss

    def _rows_beside_loss(self, value: ast.expr) -> ast.expr | None:
        """Return the number of rows in ``loss.item() * len(x)``."""
        if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult)):
            return None
        for loss, rows in ((value.left, value.right), (value.right, value.left)):
            if self._is_loss(self._definition(loss)) and self._batch_of_rows(rows) is not None:
                return rows
        return None

    def _batch_of_rows(self, value: ast.expr) -> ast.expr | None:
        """Return the tensor whose rows are counted by ``len(x)``, ``x.size(0)`` or ``x.shape[0]``."""
        value = self._definition(value)
        batch: ast.expr | None = None
        if isinstance(value, ast.Call) and len(value.args) == 1:
            if ast.unparse(value.func) == "len":
                batch = value.args[0]
            elif is_method(value, "size") and ast.unparse(value.args[0]) == "0":
                assert isinstance(value.func, ast.Attribute)
                batch = value.func.value
        elif isinstance(value, ast.Subscript) and ast.unparse(value.slice) == "0":
            shape = value.value
            batch = shape.value if isinstance(shape, ast.Attribute) and shape.attr == "shape" else None
        names = [] if batch is None else [one.id for one in walk(batch, ast.Name)]
        return batch if names and set(names) <= self._of_batch else None


def _fraction(value: ast.expr) -> tuple[ast.expr, ast.expr | None]:
    """Return what a value divides, and by what."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        return value.left, value.right
    return value, None


def _parts(target: ast.expr) -> list[ast.expr]:
    return [part for one in target.elts for part in _parts(one)] if isinstance(target, ast.Tuple) else [target]


def _counted(value: ast.expr) -> ast.expr | None:
    """Return the comparison in ``(a == b).sum().item()``, also by ``eq``, ``torch.sum``, ``int`` or after a cast."""
    if isinstance(value, ast.Call) and is_method(value, "item") and not value.args:
        assert isinstance(value.func, ast.Attribute)
        value = value.func.value
    elif isinstance(value, ast.Call) and ast.unparse(value.func) in ("int", "float") and len(value.args) == 1:
        value = value.args[0]
    summed = _without_casts(value)
    if not isinstance(summed, ast.Call) or last_name(summed.func) != "sum" or summed.keywords:
        return None
    if ast.unparse(summed.func) == "torch.sum" and len(summed.args) == 1:
        compared = summed.args[0]
    elif isinstance(summed.func, ast.Attribute) and not summed.args:
        compared = summed.func.value
    else:
        return None
    compared = _without_casts(compared)
    return compared if _compares(compared) else None


def _compares(value: ast.expr) -> bool:
    """Whether a value compares tensors entry by entry, or all entries of each row."""
    if isinstance(value, ast.Compare):
        return len(value.ops) == 1 and isinstance(value.ops[0], _ORDERS)
    if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.BitAnd, ast.BitOr)):
        return _compares(value.left) or _compares(value.right)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("any", "all"):
        given = [*value.args, *(one.value for one in value.keywords if one.arg == "dim")]
        return [ast.unparse(one) for one in given] in (["1"], ["-1"]) and _compares(value.func.value)
    return isinstance(value, ast.Call) and last_name(value.func) in ("eq", "ne")


def _without_casts(value: ast.expr) -> ast.expr:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _CASTS:
        value = value.func.value
    return value
