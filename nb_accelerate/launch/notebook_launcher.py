"""``notebook_launcher``: a function, on every rank, from one cell."""

from __future__ import annotations

import contextlib
import linecache
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.launch import LaunchOptions
from nb_accelerate.launch.environ import rank_environ
from nb_accelerate.launch.handle import RankHandle
from nb_accelerate.launch.machine import look
from nb_accelerate.launch.output import write_here
from nb_accelerate.launch.plan import make_plan
from nb_accelerate.launch.server import warm_server
from nb_accelerate.launch.supervisor import Supervisor
from nb_accelerate.launch.values import Values
from nb_accelerate.protocol.messages import Setup
from nb_accelerate.protocol.shipping import pack, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nb_accelerate.launch.plan import LaunchPlan


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    *,
    kwargs: Mapping[str, Any] | None = None,
    start_method: str = "auto",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Values:
    """Run a function on every rank and return what each of them returned.

    Each rank is a process of its own, also if there is just one, so the notebook stays as it was: launch as often
    as you like. Functions and classes defined in cells, closures and lambdas are fine. What ranks print appears in
    the cell.

    Args:
        function: what to run. It makes its own `Accelerator()`.
        args: its positional arguments.
        num_processes: number of ranks. None is one for each GPU, or one on a machine without.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``: `Accelerator()`'s default in ranks.
        kwargs: its keyword arguments.
        start_method: ``"auto"`` chooses. ``"forkserver"``: ranks are forked from a warm process that has torch
            imported and nothing of this notebook in it.
        env: environment variables of the ranks, on top of those of this process.
        timeout: seconds after which the launch is stopped. None is no limit.

    Returns:
        The ranks' return values, in rank order. A cell that ends in the call shows nothing if all of them are None.
        Tensors on a device come back on the CPU.

    Raises:
        ConfigError: an argument cannot be; nothing was started.
        ShippingError: the function or an argument cannot be sent to another process.
        RankDiedError: a rank's process ended before the function returned: carries its signal or exit code.
        DeadlineError: `timeout` has passed.
        KeyboardInterrupt: the cell was interrupted. Every rank has ended.
        BaseException: what the function raised in a rank, with its own type. The first cause, if several ranks fail.

    Example:
        >>> def train(lr):
        ...     accelerator = Accelerator()
        ...     return accelerator.process_index
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)
        [0, 1]
    """
    options = LaunchOptions(
        function=function,
        args=args,
        kwargs=kwargs or {},
        num_processes=num_processes,
        mixed_precision=mixed_precision,
        start_method=start_method,
        env=env or {},
        timeout=timeout,
    )
    return _run(options, make_plan(options, look()))


def _run(options: LaunchOptions, plan: LaunchPlan) -> Values:
    name = getattr(options.function, "__qualname__", type(options.function).__name__)
    with (
        pack((options.function, options.args, dict(options.kwargs)), name=f"the call of {name}") as call,
        _started(options, plan) as handles,
        Supervisor(handles, call, write_here, timeout=options.timeout) as supervisor,
    ):
        answers = supervisor.run()
    return Values(unpack(result.parcel, fds) for result, fds in answers)


@contextlib.contextmanager
def _started(options: LaunchOptions, plan: LaunchPlan) -> Iterator[list[RankHandle]]:
    """The ranks, on their way: forked or about to be, with their `Setup` sent."""
    server = warm_server()
    run_id = f"nb_accelerate-{secrets.token_hex(4)}"
    base = dict(os.environ)
    with _loopback_listener() as listener, pack(notebook_sources()) as sources:
        port = listener.getsockname()[1]
        handles = []
        for rank in range(plan.num_processes):
            serves_store = rank == 0
            handle = RankHandle(rank, store_fd=os.dup(listener.fileno()) if serves_store else -1)
            handles.append(handle)
            server.start(handle)
            setup = Setup(
                rank=rank,
                environ=rank_environ(plan, rank, base=base, extra=options.env, port=port, run_id=run_id),
                cwd=str(Path.cwd()),
                sys_path=tuple(sys.path),
                argv=tuple(sys.argv),
                num_threads=plan.num_threads,
                sources=sources.parcel,
                store_port=port if serves_store else None,
            )
            handle.channel.send(setup, sources.fds)
    yield handles


def _loopback_listener() -> socket.socket:
    """A listening socket for the rendezvous store, bound where only this machine can reach it."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)  # every rank connects before rank 0 has had time to accept
    return listener


def notebook_sources() -> dict[str, str]:
    """Text of everything that was compiled here from no file: the cells that have run, by their file name."""
    return {
        filename: "".join(entry[2])
        for filename, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }
