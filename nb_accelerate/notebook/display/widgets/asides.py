"""What can be opened below a panel while it runs, as HTML: the stacks of ranks, and the log of one."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import named

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAST_LINES = 40  # lines of a log that are shown
_KEPT_LINES = 200  # last lines of each rank that are kept of a run that is over


def stacks(frames: Mapping[int, tuple[list[str], list[str]]]) -> str:
    """Return where ranks are: users' frames a line each, then those of libraries, which unfold."""
    found = "".join(_stack(rank, users, others) for rank, (users, others) in sorted(frames.items()))
    return _pre(found or "no answer yet", "where ranks are")


def _stack(rank: int, users: list[str], others: list[str]) -> str:
    lines = "".join(f"<div>  {escape(frame)}</div>" for frame in users)
    if others:
        each = "".join(f"<div>    {escape(frame)}</div>" for frame in others)
        folded = escape(" ← ".join(others))
        lines += f'<details class="nba-dim"><summary class="nba-frames">  in {folded}</summary>{each}</details>'
    return f"<div><b>{named([rank])}</b></div>{lines}"


def log(text: str, rank: int) -> str:
    """Return the last lines that a rank has printed."""
    lines = "".join(text.splitlines(keepends=True)[-_LAST_LINES:])
    return _pre(escape(lines or "nothing yet"), f"log of rank {rank}", "nba-newest-last")


def logs(texts: Mapping[int, str]) -> str:
    """Return what ranks have printed, folded, for a panel that stays; nothing of ranks that printed nothing."""
    return "".join(
        f'<div class="nba"><details><summary>log of rank {rank}</summary>'
        f'<pre class="nba-aside">{escape(text)}</pre></details></div>'
        for rank, text in texts.items()
        if text
    )


def last_lines(text: str) -> str:
    """Return as much of a log as is kept of a run that is over."""
    return "".join(text.splitlines(keepends=True)[-_KEPT_LINES:])


def _pre(markup: str, label: str, kind: str = "") -> str:
    """Return text in which one can scroll, also by the keyboard."""
    names = f"nba-aside {kind}".strip()
    return f'<div class="nba"><pre class="{names}" tabindex="0" aria-label="{label}">{markup}</pre></div>'
