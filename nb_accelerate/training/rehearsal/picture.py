"""The memory of a rehearsed rank over its first steps as a picture: what it holds, one part upon the other."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.base.words import size
from nb_accelerate.training.rehearsal.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.rehearsal.memory import Mark

_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT = 720, 190, 64, 16, 18  # pixels
_COLORS = ("#1f66ba", "#b35c00", "#d9a441", "#3f8f5f", "#9a7fa8", "#6aa6c9", "#c9c9c9")
_PARTS = {"the forward": "forward", "the backward": "backward", "the optimizer's step": "step"}


def picture(memory: Sequence[Memory], marks: Sequence[Mark], capacity: int, device: str) -> str:
    """Return SVG: time, as operations follow one another, to the right; bytes upwards, to the peak or the device."""
    peak = max(map(sum, memory))
    has_line = peak < 4 * capacity <= 16 * peak  # a line that is higher leaves too little room for the memory
    top = 1.08 * max(peak, capacity if has_line else 0)

    def x(index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * index / max(1, len(memory) - 1)

    def y(held: float) -> float:
        return _TOP + _HEIGHT * (1 - held / top)

    drawn = []
    below = [0] * len(memory)
    for part, color in enumerate(_COLORS):
        above = [low + held[part] for low, held in zip(below, memory, strict=True)]
        if above != below:
            outline = [*enumerate(above), *reversed([*enumerate(below)])]
            points = " ".join(f"{x(index):.1f},{y(held):.1f}" for index, held in outline)
            drawn.append(f'<polygon points="{points}" fill="{color}"/>')
        below = above
    drawn += [_text(_LEFT - 6, y(held) + 4, size(held), "end") for held in (0, peak / 2, peak)]
    if has_line:
        drawn.append(_line(_LEFT, y(capacity), _WIDTH, y(capacity), "6 3"))
        drawn.append(_text(_WIDTH, y(capacity) - 4, f"{device or 'device'} {size(capacity)}", "end"))
    last = 0.0
    for mark in marks:
        if mark.what in _PARTS and mark.at < len(memory):
            drawn.append(_line(x(mark.at), _TOP, x(mark.at), _TOP + _HEIGHT, "2 3"))
            if x(mark.at) >= last:
                drawn.append(_text(x(mark.at) + 3, _TOP + _HEIGHT + 13, _PARTS[mark.what], "start"))
                last = x(mark.at) + 58
    box = f'viewBox="0 0 {_WIDTH} {_TOP + _HEIGHT + _FOOT}"'
    title = f"memory of a rank, {size(peak)} at most"
    svg = f'<svg {box} style="max-width:{_WIDTH}px;width:100%" role="img" aria-label="{escape(title)}">'
    held_parts = [name for part, name in enumerate(Memory._fields) if any(held[part] for held in memory)]
    return f'<div>{svg}{"".join(drawn)}</svg><div style="font-size:12px">{"".join(map(_key, held_parts))}</div></div>'


def _key(name: str) -> str:
    color = _COLORS[Memory._fields.index(name)]
    square = f'<span style="display:inline-block;width:10px;height:10px;background:{color};margin-right:4px"></span>'
    return f'<span style="margin-right:14px;white-space:nowrap">{square}{name}</span>'


def _line(x1: float, y1: float, x2: float, y2: float, dashes: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="currentColor" stroke-opacity="0.6" stroke-dasharray="{dashes}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="11" fill="currentColor">{escape(text)}</text>'
