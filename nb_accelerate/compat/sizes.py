"""How to say how many bytes something takes."""

from __future__ import annotations


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text for people: ``"2.0 KB"`` is 2048 bytes."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
