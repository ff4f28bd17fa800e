"""Format numbers, times and sizes for people to read."""

from __future__ import annotations

import math

_MINUTE = 60
_HOUR = 3600
_ENDLESS = 1e9  # Seconds. What takes longer was computed from a number that means nothing.


def duration(seconds: float) -> str:
    """Format seconds as ``0:42``, ``12:07`` or ``3:05:12``."""
    whole = max(0, int(min(seconds, _ENDLESS)))
    hours, rest = divmod(whole, _HOUR)
    minutes, left = divmod(rest, _MINUTE)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def brief(seconds: float) -> str:
    """Format seconds for a sentence: ``12 s``, ``3 min``."""
    return f"{seconds:.0f} s" if seconds < 2 * _MINUTE else f"{seconds / _MINUTE:.0f} min"


def count(number: float) -> str:
    """Format a count: ``1,800``; one that is not whole has two decimals."""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"


def rate(per_second: float) -> str:
    """Format a rate per second with three digits."""
    if per_second >= 100 or per_second == 0:
        return f"{per_second:,.0f}"
    return f"{per_second:.1f}" if per_second >= 10 else f"{per_second:.2f}"


def measured(value: float) -> str:
    """Format a loss with about four significant digits."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2e}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def size(num_bytes: float) -> str:
    """Format bytes as ``12.4 kB``, ``8.4 MB``, ``840 MB``, ``11.2 GB`` or ``4.0 TB``."""
    if num_bytes >= 1e12:
        return f"{num_bytes / 1e12:,.1f} TB"
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    if 0 < num_bytes < 1e7:
        return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:.0f} MB"


def percent(part: float) -> str:
    """Format a share that is given in percent: ``97 %``."""
    return f"{part:.0f} %"


def plural(number: int, thing: str) -> str:
    """Format a number of things: ``1 rank``, ``4 ranks``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def capitalized(text: str) -> str:
    """Return a sentence that begins with a capital letter; all other letters stay as they are."""
    return text[:1].upper() + text[1:]
