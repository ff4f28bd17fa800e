"""A table, which is text in a terminal and HTML in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True)
class Table:
    """Rows below titles."""

    titles: Sequence[str]  # of the columns
    rows: Sequence[Sequence[str]]  # cells, as many in each as there are titles
    right: Collection[str] = ()  # titles of the columns that end on the right, as numbers do
    notes: Sequence[str] = ()  # sentences below

    def __repr__(self) -> str:
        lines = [self.titles, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = (
            "  ".join(
                cell.rjust(width) if title in self.right else cell.ljust(width)
                for cell, width, title in zip(line, widths, self.titles, strict=True)
            ).rstrip()
            for line in lines
        )
        return "\n".join((*padded, *self.notes))

    def _repr_html_(self) -> str:
        head = "".join(map(self._cell, ["th"] * len(self.titles), self.titles, self.titles))
        body = "".join(f"<tr>{''.join(map(self._cell, ['td'] * len(row), self.titles, row))}</tr>" for row in self.rows)
        notes = "".join(f'<p style="margin:2px 0">{escape(note)}</p>' for note in self.notes)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div style="overflow-x:auto">{table}{notes}</div>'

    def _cell(self, tag: str, title: str, text: str) -> str:
        side = "right" if title in self.right else "left"
        return f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'
