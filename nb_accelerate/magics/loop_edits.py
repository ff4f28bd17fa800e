"""Replacements in the source of a cell. Pure: text in, text out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.magics.loop_calls import unsure

if TYPE_CHECKING:
    import ast


@dataclass
class Edits:
    """Replacements in a text, by byte offsets, as `ast` counts columns."""

    source: str
    found: list[tuple[int, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = [0]
        for line in self.source.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def replace(self, node: ast.expr | ast.arg | ast.keyword | ast.stmt, text: str) -> None:
        """Replace a node; what is inside of another replacement stays as that one has it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        if not any(start < other_end and other_start < end for other_start, other_end, _ in self.found):
            self.found.append((start, end, text))

    def delete(self, node: ast.stmt, block: list[ast.stmt], *, is_last: bool) -> None:
        """Delete a statement.

        Args:
            node: the statement.
            block: that it is in.
            is_last: all others of the block are deleted too, so ``pass`` stays.
        """
        if is_last:
            self.replace(node, "pass")
            return
        at = block.index(node)
        before, after = block[at - 1 : at], block[at + 1 : at + 2]
        start, end = self._lines[node.lineno - 1], self._lines[node.end_lineno or node.lineno]
        if before and before[0].end_lineno == node.lineno:  # a; b
            start, end = self._end(before[0]), self._end(node)
        elif after and after[0].lineno == node.end_lineno:
            start += node.col_offset
            end = self._lines[after[0].lineno - 1] + after[0].col_offset
        self.found.append((start, end, ""))

    def _end(self, node: ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def insert_argument(self, beside: ast.expr | ast.arg, text: str) -> None:
        """Insert an argument in front of another one."""
        at = self._lines[beside.lineno - 1] + beside.col_offset
        if any(start < at < end for start, end, _ in self.found):
            raise unsure(beside, "a call of a function of this cell inside one that changes; give its value a name")
        self.found.append((at, at, text))

    def wrap(self, node: ast.expr, function: str) -> None:
        """Make an expression the argument of a function; parentheses around it become those of the call."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        text = self.source.encode()
        before = text[:start].rstrip()
        is_call = before[-2:-1].isalnum() or before[-2:-1] in (b"_", b"]", b")")
        if before.endswith(b"(") and text[end:].lstrip().startswith(b")") and not is_call:
            self.found.append((len(before) - 1, len(before) - 1, function))
        else:
            self.found += [(start, start, f"{function}("), (end, end, ")")]

    def changes(self, function: ast.FunctionDef) -> str:
        """Return the new texts in a function."""
        assert function.end_lineno is not None
        begin, end = self._lines[function.lineno - 1], self._lines[function.end_lineno]
        return "\n".join(text for start, _, text in self.found if begin <= start < end)

    def insert_before(self, node: ast.stmt, line: str) -> None:
        """Insert a line above a statement, as far indented."""
        self._insert(self._lines[node.lineno - 1], node, line)

    def insert_after(self, node: ast.stmt, line: str) -> None:
        """Insert a line below a statement, as far indented."""
        assert node.end_lineno is not None
        self._insert(self._lines[node.end_lineno], node, line)

    def _insert(self, at: int, beside: ast.stmt, line: str) -> None:
        start = self._lines[beside.lineno - 1]
        indent = self.source.encode()[start : start + beside.col_offset].decode()  # tabs stay tabs
        self.found.append((at, at, f"{indent}{line}\n"))

    def text(self) -> str:
        """Return the text with all replacements; insertions at one place stand in the order in which they were made."""
        result = self.source.encode()
        ordered = sorted(self.found, key=lambda one: one[:2])  # it keeps the order of equal ones
        for start, end, text in reversed(ordered):
            result = result[:start] + text.encode() + result[end:]
        return result.decode()
