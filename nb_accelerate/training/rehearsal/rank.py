"""Rehearse ranks: run the function in groups that exchange nothing, and return what each did."""

from __future__ import annotations

import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the group that exchanges nothing

from nb_accelerate.base.seam import training_half
from nb_accelerate.errors.traceback_lines import user_frames
from nb_accelerate.training.process import context
from nb_accelerate.training.rehearsal.devices import OnCpu, answers, kept_on_cpu, of_subclasses
from nb_accelerate.training.rehearsal.exchanges import Tape, averaging_nothing
from nb_accelerate.training.rehearsal.files import Files
from nb_accelerate.training.rehearsal.memory import outside_of_steps
from nb_accelerate.training.rehearsal.recorder import Recorder
from nb_accelerate.training.rehearsal.report import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.topology import Topology


class TimeIsUpError(BaseException):
    """The time of the rehearsal is over. The function does not catch it with its errors."""


def rehearse_ranks(
    function: Callable[[], Any],
    topologies: Sequence[Topology],
    folder: str,
    seconds: float,
    device: str = "",
    capacity: int = 0,
) -> list[Trace]:
    """Rehearse each rank in a process of its own, all at once. Called in the one rank of a launch.

    They are forked, so that the function's data are in memory once. The folder is for files, and for what rank 0 sends.
    For a device of that capacity (bytes), two more take the steps of the first rank with a half and a quarter of the
    rows of each batch.
    """
    torch.set_num_threads(1)  # threads of more would not be there after a fork
    importlib.import_module("torch._dynamo")  # which each optimizer imports, for seconds
    Path(folder, "tape").touch()
    ranks = [topology.rank for topology in topologies]
    forks, started, traces = multiprocessing.get_context("fork"), list[Any](), list[Trace]()
    try:
        smaller = [(topologies[0], 2), (topologies[0], 4)] if capacity else []
        for topology, divisor in [*((each, 1) for each in topologies), *smaller]:
            mine, its = forks.Pipe(duplex=False)
            arguments = (function, topology, ranks, Path(folder), seconds, its, divisor, device, capacity)
            process = forks.Process(target=_rehearse_rank, args=arguments)
            process.start()
            # Else this process would hold the pipe open, and never hear that the other one has died.
            its.close()
            started.append((topology.rank, process, mine))
        for rank, process, mine in started:
            try:
                traces.append(mine.recv())
            except EOFError:
                process.join()
                if rank == 0 and not traces:  # the others would wait for what it sends
                    Tape(Path(folder), writes=True).write(None)
                traces.append(Trace(rank, failure=f"the process ended with exit code {process.exitcode}"))
    finally:
        for _, process, mine in started:
            process.kill()
            process.join()
            mine.close()
    for trace in traces[len(ranks) :]:
        if trace.memory:
            rows, held = outside_of_steps(trace.memory, trace.marks)
            traces[0].smaller.append((rows, sum(held)))
    return traces[: len(ranks)]


def _rehearse_rank(
    function: Callable[[], Any],
    topology: Topology,
    ranks: list[int],
    folder: Path,
    seconds: float,
    pipe: Any,
    divisor: int,
    device: str,
    capacity: int,
) -> None:
    """Rehearse the rank whose place this process takes, and end: nothing that is replaced here is put back."""
    trace, began = Trace(topology.rank), time.monotonic()
    writes_tape = topology.is_main and divisor == 1
    tape = Tape(folder, writes=writes_tape) if 0 in ranks else None
    folder_name = f"{topology.rank}" if divisor == 1 else f"{topology.rank} of fewer rows, {divisor}"
    recorder = Recorder(trace, ranks, tape, Files(folder, folder_name, trace.files), topology.local_rank, divisor)
    # Libraries send nothing anywhere, and draw no bars.
    os.environ.update(topology.as_variables() | {"WANDB_MODE": "disabled", "TQDM_DISABLE": "1"})
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # modes of torch are of this thread
    torch.compiler.set_stance("force_eager")
    torch.serialization.register_package(0, lambda _: None, kept_on_cpu)
    context.this_rank().rehearsal = recorder
    dist.init_process_group("fake", rank=topology.rank, world_size=topology.world_size, store=FakeStore())
    # Numbers that were not computed are not shown. Notes of this package go to `sys.__stdout__`, logs have streams.
    for name in ("stdout", "__stdout__"):
        setattr(sys, name, io.StringIO())
    sys.stderr = stderr = io.StringIO()
    logging.disable()
    warnings.simplefilter("ignore")
    recorder.files.use()

    def end(*_: object) -> NoReturn:
        raise TimeIsUpError

    signal.signal(signal.SIGALRM, end)
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    checks: dict[str, Any] = {name: of_subclasses(getattr(torch.nn.functional, name)) for name in names}
    init = averaging_nothing(DistributedDataParallel.__init__, recorder)
    try:
        with (
            mock.patch.object(dist, "init_process_group"),
            mock.patch.object(DistributedDataParallel, "__init__", init),
            mock.patch.object(torch.UntypedStorage, "resize_", recorder.resized(torch.UntypedStorage.resize_)),
            mock.patch.multiple("torch.cuda", **answers(device, capacity, recorder.note)),
            mock.patch.multiple(torch.nn.functional, **checks),
            OnCpu(topology.local_rank, recorder.device_of),
            recorder,
        ):
            signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)  # the seconds until one that goes on is told again
            try:
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        trace.ended = True
    except TimeIsUpError:
        pass
    except BaseException as error:
        trace.ended = isinstance(error, SystemExit) and not error.code
        if not trace.ended:
            text = recorder.files.as_named(str(error).strip().split("\n")[0])
            if isinstance(error, SystemExit):  # of argparse, say, which prints why
                text = stderr.getvalue().strip().split("\n")[-1] or text
            trace.failure = f"{type(error).__name__}: {text}" if text else type(error).__name__
            frames = user_frames(error.__traceback__)
            trace.failed_at = (frames[-1].filename, frames[-1].lineno) if frames else ("", 0)
    if tape is not None and writes_tape:
        tape.write(None)
    trace.seconds = time.monotonic() - began
    pipe.send(trace)


def run_cell(function: Any, wants_accelerator: bool) -> None:
    """Run a cell that was made a function, with the variables that cells get."""
    half, names = training_half(), function.__globals__
    names |= half.join_group(timedelta(minutes=10))
    if wants_accelerator and "accelerator" not in names:
        names["accelerator"] = half.make_accelerator()
    function()
