"""Names of ``accelerate.launchers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.launch import notebook_launcher

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["debug_launcher", "notebook_launcher"]


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Run a function on several processes of this machine's CPU, to try out what it does on many devices.

    Args:
        function: what to run.
        args: its arguments.
        num_processes: how many.

    Returns:
        What each process returned, in their order.
    """
    return notebook_launcher(function, args, num_processes, devices="cpu")
