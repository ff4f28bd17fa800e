"""Start methods: who makes the processes of a launch. One row each."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from nb_accelerate.config.env import Environment
from nb_accelerate.launch.servers import ColdServer, ForkedServer, WarmServer, retire_warm_server, warm_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.servers import RankServer

    Starter = Callable[[LaunchOptions], contextlib.AbstractContextManager[RankServer]]


@contextlib.contextmanager
def _forkserver(_: LaunchOptions) -> Iterator[RankServer]:
    if Environment().keep_warm:
        try:
            yield warm_server()  # and leave it: the next launch starts in milliseconds
        finally:
            retire_warm_server()  # unless something is wrong with it
        return
    server = WarmServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _spawn(_: LaunchOptions) -> Iterator[RankServer]:
    server = ColdServer()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _fork(options: LaunchOptions) -> Iterator[RankServer]:
    server = ForkedServer((options.function, options.args, dict(options.kwargs)))
    try:
        yield server
    finally:
        server.close()


STARTERS: dict[str, Starter] = {"forkserver": _forkserver, "fork": _fork, "spawn": _spawn}
"""Open one for a launch; it closes what belongs to that launch only. ``inline`` starts nothing."""
