"""Run a script on all ranks of this machine, supervised from a terminal."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.config.launch import LaunchOptions
from nb_accelerate.devices import find_kind
from nb_accelerate.display.frontend import choose_front_end
from nb_accelerate.errors import ConfigError, LaunchError, RankDiedError
from nb_accelerate.launch.environ import rank_environ
from nb_accelerate.launch.launch import Launch
from nb_accelerate.launch.machine import VisibleDevices, look
from nb_accelerate.launch.neighbours import gpu_warnings
from nb_accelerate.launch.panel import announce
from nb_accelerate.launch.plan import make_plan
from nb_accelerate.launch.rendezvous import Rendezvous
from nb_accelerate.ranks.failures import RankTraceback
from nb_accelerate.ranks.sinks import StreamSink
from nb_accelerate.worker.script import run_module, run_program, run_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from nb_accelerate.launch.machine import MachineFacts
    from nb_accelerate.launch.plan import LaunchPlan

_FAILED = 1
"""Exit code of a script that raised."""

_SIGNALLED = 128
"""Added to the number of the signal that ended a script, for its exit code."""
"""What a shell adds to the number of the signal that ended a command."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The program that each rank runs.

    Attributes:
        target: path of a script, name of a module, or a program.
        arguments: of the target, as they were written.
        kind: ``script``, ``module`` or ``program``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command line that would start one rank by hand."""
        python = {"script": (sys.executable,), "module": (sys.executable, "-m"), "program": ()}[self.kind]
        return (*python, self.target, *self.arguments)

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Return the function that a rank calls, and its arguments."""
        if self.kind == "program":
            return run_program, (self.command,)
        return (run_module if self.kind == "module" else run_script), (self.target, self.arguments)


def options_for(job: Job, **options: Any) -> LaunchOptions:
    """Return the options of a launch that runs a job.

    Raises:
        ConfigError: an option cannot be.
    """
    function, args = job.call
    return LaunchOptions(function=function, args=args, **options)


def run(job: Job, options: LaunchOptions) -> int:
    """Run a job on every rank until all have ended; return the exit code of the command.

    That is 0, the exit code of the first rank that ended with another one, 1 after an exception, or 128 and the number
    of a signal: 130 for an interrupt, 143 for SIGTERM.

    Raises:
        ConfigError: the options cannot be on this machine, or with those of the other machines.
    """
    plan = planned(options, look(options.env))
    sink = _TerminalSink()
    front_end = choose_front_end(options.progress)
    if front_end != "off":
        announce(plan, sink, front_end)
        for warning in (*plan.warnings, *gpu_warnings(plan)):
            sink.write("stderr", warning + "\n")
    launch = Launch(options, plan, sink, front_end, name=Path(job.target).name)
    sink.on_closed = launch.stop
    with _stopped_by_signals(launch) as received:
        try:
            launch.run()
        except BaseException as error:
            if isinstance(error, ConfigError) and not isinstance(error.__cause__, RankTraceback):
                raise  # of this command line, such as a port that is taken; not of the script
            code = _exit_code(error)
            if not (received or sink.is_closed):
                tell(error)
        else:
            code = 0
    if received:
        return _SIGNALLED + received[0]
    return _SIGNALLED + signal.SIGPIPE if sink.is_closed else code


def planned(options: LaunchOptions, facts: MachineFacts) -> LaunchPlan:
    """Return the plan of a launch from a terminal.

    Raises:
        ConfigError: the options cannot be on this machine.
    """
    return make_plan(options, facts, may_copy=False)  # nothing is in memory here; a server has torch imported


def describe(job: Job, options: LaunchOptions, *, wants_gpus: bool) -> Iterator[str]:
    """Print what `run` would start, and start nothing.

    Args:
        job: what to run.
        options: how.
        wants_gpus: GPUs were asked for; where none is visible the lines are those of a machine that has enough.
    """
    facts = look(options.env)
    if wants_gpus and not facts.num_gpus:
        number = options.num_processes or 1
        yield f"# no GPU is visible here; on a machine with {number} GPU{'s' if number > 1 else ''}:"
        facts = _with_gpus(facts, options)
    plan = planned(options, facts)
    yield f"# {plan.describe()}"
    for local_rank in range(plan.num_processes):
        changed = _changed_environ(plan, options, local_rank)
        yield " ".join(
            ("env", *(f"{name}={shlex.quote(value)}" for name, value in changed), *map(shlex.quote, job.command))
        )


def _with_gpus(facts: MachineFacts, options: LaunchOptions) -> MachineFacts:
    numbers = () if options.devices is None or isinstance(options.devices, str) else options.devices
    number = max((options.num_processes or 1), *(device + 1 for device in numbers), 1)
    cuda = find_kind("cuda")
    assert cuda is not None
    gpus = VisibleDevices(kind=cuda, names=tuple(map(str, range(number))))
    return replace(facts, accelerators=(gpus,), prefers_cpu=False)


def _changed_environ(plan: LaunchPlan, options: LaunchOptions, local_rank: int) -> list[tuple[str, str]]:
    """Variables of a rank that is started by hand: then rank 0 serves the store by itself, and others look for it."""
    several = plan.num_nodes > 1
    rendezvous = Rendezvous(
        address=options.master_addr,
        port=int(options.use_port or (29500 if several else 0)),
        node_rank=options.node_rank,
        interface="INTERFACE" if several else plan.loopback,
        run_id=options.rdzv_id,
        listener=None,
        file=0,
        keeps_interface=several,
    )
    environ = rank_environ(plan, rendezvous, local_rank, base=os.environ, extra=options.env)
    if not rendezvous.port:
        environ["MASTER_PORT"] = "FREE_PORT"
    return sorted((name, value) for name, value in environ.items() if os.environ.get(name) != value)


@dataclass
class _TerminalSink(StreamSink):
    """Standard output and error. Whoever reads them may leave before the end, as ``head`` does."""

    on_closed: Callable[[], None] = lambda: None
    is_closed: bool = False

    @override
    def _print(self, stream: IO[str] | None, text: str) -> None:
        if self.is_closed or stream is None:
            return
        try:
            stream.write(text)
            stream.flush()
        except UnicodeEncodeError:
            super()._print(stream, text)
        except BrokenPipeError:
            self.is_closed = True
            # Python flushes its streams once more at its end, and would complain.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            threading.Thread(target=self.on_closed, daemon=True).start()


@contextlib.contextmanager
def _stopped_by_signals(launch: Launch) -> Iterator[list[int]]:
    """End the ranks at SIGTERM, and when the terminal is closed; yield the list of signals that arrived."""
    received: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        # It waits for the end of the launch, which is the business of this very thread.
        threading.Thread(target=launch.stop, daemon=True).start()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _SIGNALLED + signal.SIGINT
    if isinstance(error, RankDiedError) and error.exitcode is not None:
        return _SIGNALLED - error.exitcode if error.exitcode < 0 else error.exitcode
    return _FAILED


def tell(error: BaseException) -> None:
    """Show the user's traceback, or one sentence: no frame of this package."""
    cause = error.__cause__
    if isinstance(error, KeyboardInterrupt):
        text = str(error)
    elif isinstance(cause, RankTraceback):
        text = str(cause).strip("\n")
    else:
        text = f"nb-accelerate: {error}" if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
    notes: Sequence[str] = getattr(error, "__notes__", ())
    print("\n".join((text, *notes)), file=sys.stderr)
