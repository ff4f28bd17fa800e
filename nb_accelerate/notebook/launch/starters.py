"""Open the server that starts the ranks of a launch: a context manager for each start method that has processes.

They are named in the rows of `base.start_methods`. Each closes what belongs to one launch only.
"""

from __future__ import annotations

import contextlib
import pkgutil
from typing import TYPE_CHECKING, cast

from nb_accelerate.base.config.env import Environment
from nb_accelerate.notebook.launch.forked_server import ForkedServer
from nb_accelerate.notebook.launch.servers import (
    ExecutedServer,
    new_warm_server,
    retire_warm_server,
    warm_server,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.base.start_methods import StartMethod
    from nb_accelerate.notebook.launch.servers import RankServer


def open_server(method: StartMethod, options: LaunchOptions) -> contextlib.AbstractContextManager[RankServer]:
    """Return a context manager with the process that starts the ranks of a launch."""
    return cast("contextlib.AbstractContextManager[RankServer]", pkgutil.resolve_name(method.starter)(options))


@contextlib.contextmanager
def forkserver(_: LaunchOptions) -> Iterator[RankServer]:
    """Start ranks as forks of a fresh process with torch imported, which is kept for the next launch."""
    if not Environment().keep_warm:
        with contextlib.closing(new_warm_server()) as server:
            yield server
        return
    try:
        yield warm_server()
    finally:
        retire_warm_server()  # unless it can be used again


def spawn(_: LaunchOptions) -> contextlib.AbstractContextManager[RankServer]:
    """Start ranks as fresh interpreters."""
    return contextlib.closing(ExecutedServer((), fresh=True))


def fork(options: LaunchOptions) -> contextlib.AbstractContextManager[RankServer]:
    """Start ranks as forks of this process, with the function and its arguments in memory."""
    return contextlib.closing(ForkedServer((options.function, options.args, dict(options.kwargs))))
