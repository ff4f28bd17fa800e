"""Rehearse ranks: run the function in groups that exchange nothing, and return what each did."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nb_accelerate.base.seam import training_half
from nb_accelerate.errors.traceback_lines import user_frames
from nb_accelerate.training.process import context, group
from nb_accelerate.training.rehearsal.exchanges import Tape
from nb_accelerate.training.rehearsal.files import Files
from nb_accelerate.training.rehearsal.recorder import Recorder
from nb_accelerate.training.rehearsal.torch_parts import make_fake_group
from nb_accelerate.training.rehearsal.trace import Trace
from nb_accelerate.training.rehearsal.wrapper import averaging_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nb_accelerate.base.topology import Topology

_VARIABLES = {"WANDB_MODE": "disabled", "TQDM_DISABLE": "1"}
"""Variables with which libraries send nothing anywhere, and draw no bars."""

_AGAIN = 2.0
"""Seconds after which a rank that goes on after its time is told again."""


_GROUP_TIMEOUT = timedelta(minutes=10)


class TimeIsUpError(BaseException):
    """The time of the rehearsal is over. No error of the function, which is not to catch it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to rehearse.

    Attributes:
        topologies: the ranks to rehearse.
        folder: for files, and for what rank 0 sends.
        seconds: that each rank has.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    topologies: tuple[Topology, ...]
    folder: str
    seconds: float


def rehearse_ranks(job: Job) -> list[Trace]:
    """Rehearse each rank in a process of its own, all at once. Called in the one rank of a launch.

    They are forked, so that the function's data are in memory once.
    """
    torch.set_num_threads(1)  # threads of more would not be there after a fork
    importlib.import_module("torch._dynamo")  # which each optimizer imports, for seconds
    forks, started = multiprocessing.get_context("fork"), list[Any]()
    try:
        for topology in job.topologies:
            mine, its = forks.Pipe(duplex=False)
            process = forks.Process(target=_send_trace, args=(job, topology, its))
            process.start()
            its.close()
            started.append((topology, process, mine))
        return [_received(job, topology.rank, *ends) for topology, *ends in started]
    finally:
        for _, process, mine in started:
            process.kill()
            process.join()
            mine.close()


def _send_trace(job: Job, topology: Topology, pipe: Any) -> None:
    pipe.send(rehearse_rank(job, topology))


def _received(job: Job, rank: int, process: Any, pipe: Any) -> Trace:
    try:
        trace: Trace = pipe.recv()
    except EOFError:
        process.join()
        if rank == 0:  # the others would wait for what it sends
            Tape(Path(job.folder, "tape"), writes=True).write(None)
        return Trace(rank, failure=f"the process ended with exit code {process.exitcode}")
    return trace


def rehearse_rank(job: Job, topology: Topology) -> Trace:
    """Rehearse the rank whose place this process takes."""
    ranks = [one.rank for one in job.topologies]
    trace = Trace(topology.rank)
    folder = Path(job.folder)
    tape = Tape(folder / "tape", writes=topology.is_main) if 0 in ranks else None
    recorder = Recorder(trace, ranks, tape, Files(folder, topology.rank, trace.files))
    said, began = io.StringIO(), time.monotonic()
    os.environ.update(topology.as_variables() | _VARIABLES)
    torch.compiler.set_stance("force_eager")
    context.this_rank().rehearsal = recorder
    make_fake_group(topology.rank, topology.world_size)
    make_wrapper = averaging_nothing(DistributedDataParallel.__init__, recorder.tell)
    try:
        with (
            mock.patch.object(dist, "init_process_group", _group_is_there),
            mock.patch.object(DistributedDataParallel, "__init__", make_wrapper),
            _silent() as said,
            recorder.files.used(),
            recorder.operations,
            _limited(job.seconds),
        ):
            job.function(*job.args, **job.kwargs)
        trace.ended = True
    except TimeIsUpError:
        pass
    except BaseException as error:
        trace.ended = isinstance(error, SystemExit) and not error.code
        if not trace.ended:
            text = str(error).strip().split("\n")[0]
            if isinstance(error, SystemExit):  # of argparse, say, which prints why
                text = said.getvalue().strip().split("\n")[-1] or text
            trace.failure = f"{type(error).__name__}: {text}" if text else type(error).__name__
            frames = user_frames(error.__traceback__)
            trace.failed_at = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    finally:
        context.this_rank().rehearsal = None
        if tape is not None and topology.is_main:
            tape.write(None)
        group.close()
    trace.seconds = time.monotonic() - began
    return trace


def run_cell(function: Any, wants_accelerator: bool) -> None:
    """Run a cell that was made a function, with the variables that cells get."""
    half, names = training_half(), function.__globals__
    names |= half.join_group(_GROUP_TIMEOUT)
    if wants_accelerator and "accelerator" not in names:
        names["accelerator"] = half.make_accelerator()
    function()


def _group_is_there(*_: Any, **__: Any) -> None:
    """Stand in for `init_process_group` of code that makes the group by itself."""


@contextlib.contextmanager
def _silent() -> Iterator[io.StringIO]:
    """Show nothing of what the function prints, numbers that were not computed; yield what it has printed as errors."""
    errors = io.StringIO()
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(errors),
        mock.patch.object(sys, "__stdout__", nothing),  # where notes of this package go
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable()  # handlers have streams of their own
        yield errors


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End a block after some time."""

    def end(*_: object) -> NoReturn:
        raise TimeIsUpError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
