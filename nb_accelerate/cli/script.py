"""Run a script on all ranks of this machine, supervised from a terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.cli.closed_output import discard_stdout
from nb_accelerate.errors import ConfigError, LaunchError, RankDiedError
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.launch.description import announce
from nb_accelerate.notebook.launch.launch import Launch
from nb_accelerate.notebook.launch.machine import gpu_warnings
from nb_accelerate.notebook.ranks.failing.errors import RankTraceback
from nb_accelerate.notebook.ranks.output.sinks import StreamSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.worker.script import Job

_SIGNALLED = 128  # what a shell adds to the number of the signal that ended a command


def run(job: Job, options: LaunchOptions, plan: LaunchPlan) -> int:
    """Run a job on every rank until all have ended; return the exit code of the command.

    That is 0, the exit code of the first rank that ended with another one, 1 after an exception, or 128 and the number
    of a signal: 130 for an interrupt, 143 for SIGTERM.
    """
    sink = _TerminalSink()
    front_end = choose_front_end(options.progress)
    if front_end != "off":
        announce(plan, sink, front_end)
        for warning in (*plan.warnings, *gpu_warnings(plan.kind, plan.device_names)):
            sink.write("stderr", warning + "\n")
    launch = Launch(options, plan, sink, front_end, name=Path(job.target).name, exit_returns=True)
    sink.on_closed = launch.stop
    with _stopped_by_signals(launch) as received:
        try:
            launch.run()
        except BaseException as error:
            cause = error.__cause__
            if isinstance(error, ConfigError) and not isinstance(cause, RankTraceback):
                raise  # of this command line, such as a port that is taken; not of the script
            code = _exit_code(error)
            if received or sink.is_closed:
                pass
            elif job.kind == "program" and isinstance(error, RankDiedError) and isinstance(cause, RankTraceback):
                # Not the rank itself: it has waited for the program, and passes its exit code on.
                print(f"nb-accelerate: {job.target} ended with exit code {code} on rank {error.rank}", file=sys.stderr)
            else:
                tell(error)
        else:
            code = 0
    if received:
        return _SIGNALLED + received[0]
    return _SIGNALLED + signal.SIGPIPE if sink.is_closed else code


@dataclass
class _TerminalSink(StreamSink):
    """Standard output and error. Their reader may leave before the end, as ``head`` does."""

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
            discard_stdout()
            HelperThread(self.on_closed, name="stop").start()


@contextlib.contextmanager
def _stopped_by_signals(launch: Launch) -> Iterator[list[int]]:
    """End the ranks at SIGTERM, and when the terminal is closed; yield the list of signals that arrived."""
    received: list[int] = []

    def stop(signum: int, _: FrameType | None) -> None:
        received.append(signum)
        # It waits for the end of the launch, which is the business of this very thread.
        HelperThread(launch.stop, name="stop").start()

    # SIGHUP comes when the terminal is closed. By default both end this process at once, and what ranks save is lost.
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
    return 1


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
    told = cause.who if isinstance(cause, RankTraceback) else ""
    more = [note for note in notes if note != told and note not in text]  # which has the notes of the user's code
    print("\n".join((text, *more)), file=sys.stderr)
