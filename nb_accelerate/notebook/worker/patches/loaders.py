"""How a rank starts children, such as workers of a DataLoader, and pickles what they run: by value.

The standard library pickles by name, and a class that was defined in a cell has no module to import it from.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.reduction
import sys
from collections import ChainMap
from typing import IO, Any

from nb_accelerate.notebook.protocol.main_module import CODE_REDUCERS, Globals, MainPickler


class _ByValuePickler(MainPickler):
    """cloudpickle that also knows what multiprocessing and torch have registered: connections, queues, tensors."""

    def __init__(self, file: IO[bytes], protocol: int | None = None) -> None:
        registered = multiprocessing.reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined] # noqa: SLF001
        # Set before the C code's constructor looks it up, which it does once.
        self.dispatch_table = ChainMap(registered, CODE_REDUCERS)
        super().__init__(file, globals_there=Globals.OF_RECEIVER_AND_SENT, protocol=protocol)


def _dump(obj: Any, file: IO[bytes], protocol: int | None = None) -> None:
    _ByValuePickler(file, protocol).dump(obj)


def fork_by_default() -> None:
    """Let children on Linux be forked unless users choose another way, as before Python 3.14, which spawns them."""
    # Workers of a DataLoader start 45 times faster so, and functions of a notebook need not be pickled.
    if sys.platform == "linux":
        contexts: Any = multiprocessing.context
        contexts._default_context._default_context = multiprocessing.get_context("fork")  # noqa: SLF001 - sets no choice


def spawn_by_value() -> None:
    """Let processes that this one spawns run functions and classes of a notebook."""
    multiprocessing.reduction.dump = _dump  # type: ignore[assignment]
