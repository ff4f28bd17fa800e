"""Rewrite a plain training loop to one with an `Accelerator`. Pure: text in, text out.

Only the places that change are edited, so comments and layout stay.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.loop_reading import is_method, read_loop, unsure, walk

if TYPE_CHECKING:
    from nb_accelerate.magics.loop_reading import TrainingLoop

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")

_DEVICE_WORDS = ("cpu", "cuda", "mps", "xpu")


@dataclass
class _Edits:
    """Replacements in a text, by byte offsets, as `ast` counts columns."""

    source: str
    found: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = [0]
        for line in self.source.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def replace(self, node: ast.expr, text: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        if not any(start < other_end and other_start < end for other_start, other_end, _ in self.found):
            self.found.append((start, end, text))

    def insert_before(self, node: ast.stmt, line: str) -> None:
        self._insert(self._lines[node.lineno - 1], node, line)

    def insert_after(self, node: ast.stmt, line: str) -> None:
        assert node.end_lineno is not None
        self._insert(self._lines[node.end_lineno], node, line)

    def _insert(self, at: int, beside: ast.stmt, line: str) -> None:
        start = self._lines[beside.lineno - 1]
        indent = self.source.encode()[start : start + beside.col_offset].decode()  # tabs stay tabs
        self.found.append((at, at, f"{indent}{line}\n"))

    def text(self) -> str:
        result = self.source.encode()
        for start, end, text in sorted(self.found, key=lambda one: one[:2], reverse=True):
            result = result[:start] + text.encode() + result[end:]
        return result.decode()


@dataclass(frozen=True)
class Rewritten:
    """A cell that was rewritten.

    Attributes:
        text: of the new cell.
        notes: what stays as it was and may have to be changed by hand, one line each.
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
    if ";" in _line_of(source, loop.prepare_after.end_lineno or 1).partition("#")[0]:
        raise unsure(loop.prepare_after, "two statements in one line; write them in two")
    edits = _Edits(source)
    _insert_accelerator(loop, edits)
    scope: ast.AST = loop.function or loop.tree
    _rewrite_calls(scope, loop, edits)
    _rewrite_devices(scope, edits)
    text = edits.text()
    if launch:
        text = _launched(text, loop)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"the changed cell could not be read ({error}). Nothing was changed") from error
    return Rewritten(text, tuple(_notes(scope, loop)))


def _insert_accelerator(loop: TrainingLoop, edits: _Edits) -> None:
    top = next(one for one in loop.tree.body if not (isinstance(one, ast.ImportFrom) and one.module == "__future__"))
    if isinstance(top, (ast.FunctionDef, ast.ClassDef)) and top.decorator_list:
        raise unsure(top, "a decorated definition before anything else; put an import above it")
    edits.insert_before(top, "from nb_accelerate import Accelerator")
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    first = next(
        one
        for one in loop.body
        if not isinstance(one, quiet) and not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
    )
    edits.insert_before(first, "accelerator = Accelerator()")
    names = ", ".join([loop.model, loop.optimizer, loop.loader, *loop.schedulers])
    edits.insert_after(loop.prepare_after, f"{names} = accelerator.prepare({names})")


def _rewrite_calls(scope: ast.AST, loop: TrainingLoop, edits: _Edits) -> None:
    source = edits.source
    assert isinstance(loop.backward.func, ast.Attribute)
    loss = ast.get_source_segment(source, loop.backward.func.value)
    edits.replace(loop.backward, f"accelerator.backward({loss})")
    for call in walk(scope, ast.Call):
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] in _CLIPS:
            edits.replace(call.func, f"accelerator.{name.rpartition('.')[2]}")
        elif name == "torch.save":
            edits.replace(call.func, "accelerator.save")
        elif name == f"{loop.model}.state_dict":
            edits.replace(call.func, f"accelerator.unwrap_model({loop.model}).state_dict")
        elif name == f"{loop.own_loss}.item" and _runs_on_all_ranks(call, loop):
            edits.replace(call.func, f'accelerator.reduce({loop.own_loss}.detach(), "mean").item')


def _runs_on_all_ranks(call: ast.Call, loop: TrainingLoop) -> bool:
    """Whether nothing but loops stands between a call and the loop over batches, so that a collective may be there."""
    branches = [one for one in ast.walk(loop.loop) if isinstance(one, (ast.If, ast.IfExp, ast.Try, ast.BoolOp))]
    return call in ast.walk(loop.loop) and not any(call in ast.walk(one) for one in branches)


def _rewrite_devices(scope: ast.AST, edits: _Edits) -> None:
    names = [one for one in walk(scope, ast.Name) if one.id == "device"]
    if names and not any(isinstance(one.ctx, ast.Store) for one in names):
        raise unsure(names[0], "'device' is made elsewhere; write device = 'cpu' beside the loop, which is replaced")
    moved_to = {
        ast.unparse(value)
        for call in walk(scope, ast.Call)
        for value in [*(call.args[:1] if is_method(call, "to") else ()), *_values(call, "device")]
    }
    for made in walk(scope, ast.Assign):
        name = ast.unparse(made.targets[0])
        if _is_device(made.value) and (name in moved_to or not _is_device_word(made.value)):
            edits.replace(made.value, "accelerator.device")
        elif name == "device":
            raise unsure(made, f"{ast.unparse(made)!r} is not a device that is understood")
    for call in walk(scope, ast.Call):
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


def _values(call: ast.Call, name: str) -> list[ast.expr]:
    return [one.value for one in call.keywords if one.arg == name]


def _is_device(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_device(value.body) and _is_device(value.orelse)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) == "torch.device" and len(value.args) == 1 and _is_device(value.args[0])
    return _is_device_word(value)


def _is_device_word(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and value.value.partition(":")[0] in _DEVICE_WORDS
    )


def _launched(text: str, loop: TrainingLoop) -> str:
    """Put all but the imports in a function, and launch it."""
    if loop.function is not None:
        raise unsure(
            loop.function,
            f"the loop is in a function already. Without --launch, then: notebook_launcher({loop.function.name}, "
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


def _notes(scope: ast.AST, loop: TrainingLoop) -> list[str]:
    notes = []
    for call in walk(scope, ast.Call):
        own = is_method(call, "item") and ast.unparse(call.func) == f"{loop.own_loss}.item"
        if (own or (is_method(call, "item") and call in ast.walk(loop.loop))) and not (
            own and _runs_on_all_ranks(call, loop)
        ):
            notes.append(f"line {call.lineno}: {ast.unparse(call)} is of this rank's rows only")
    others = [
        ast.unparse(made.targets[0])
        for made in walk(scope, ast.Assign)
        if isinstance(made.value, ast.Call)
        and ast.unparse(made.value.func).rpartition(".")[2] == "DataLoader"
        and ast.unparse(made.targets[0]) != loop.loader
    ]
    notes += [f"{name} is not shared out: every rank reads all of it" for name in others]
    if loop.epoch_schedulers:
        notes.append(f"{', '.join(loop.epoch_schedulers)} steps once for each epoch, so it is not prepared")
    return notes


def _line_of(source: str, number: int) -> str:
    return source.split("\n")[number - 1]
