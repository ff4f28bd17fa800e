"""`Recorder`: what a rehearsed rank writes down, and what the training half asks of it while it trains."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors.traceback_lines import is_ours
from nb_accelerate.training.comm import torch_distributed
from nb_accelerate.training.data.dispatching.batch_parts import count_rows
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.precision import OptimizerStep
from nb_accelerate.training.rehearsal.calls import watch_calls
from nb_accelerate.training.rehearsal.exchanges import RehearsedCollectives, described
from nb_accelerate.training.rehearsal.lines import frames, is_users_file, user_call, user_line
from nb_accelerate.training.rehearsal.torch_parts import Operations
from nb_accelerate.training.rehearsal.trace import Exchange, Pass
from nb_accelerate.training.rehearsal.wrapper import RehearsedDDP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.rehearsal.exchanges import Tape
    from nb_accelerate.training.rehearsal.files import Files
    from nb_accelerate.training.rehearsal.torch_parts import Collective
    from nb_accelerate.training.rehearsal.trace import Line, Trace

_COMPUTED_STEPS = 2
"""Steps of each optimizer that are computed. What comes later is walked through: models return what they did before."""

_LONG = 5.0
"""Seconds until all optimizers have stepped once, as rank 0 measures them, after which no second step is computed."""


class Recorder:
    """Writes a `Trace`. `training.process.context.rehearsal` has it, in a process that rehearses a rank.

    Args:
        ranks: that are rehearsed.
        tape: what rank 0 sends; None where rank 0 is not among them.
        files: what is written, and where to instead.

    Attributes:
        is_fast: nothing is computed any more.
    """

    wrapper = RehearsedDDP

    def __init__(self, trace: Trace, ranks: Sequence[int], tape: Tape | None, files: Files) -> None:
        self.trace = trace
        self.files = files
        self.is_fast = False
        self.operations = Operations(self._exchanged, self._read)
        self._ranks = ranks
        self._tape = tape
        self._steps: list[int] = []
        self._pass = Pass(("", 0))
        self._is_apart = self._is_timed = False
        self._began = time.monotonic()
        self._saved = set[str]()

    # -- exchanges

    def collectives(self, device: torch.device) -> Collectives:
        """Return collectives that exchange nothing. Asked in place of those of the process."""
        return RehearsedCollectives(device, self.tell)

    def tell(self, what: str) -> None:
        """Write down something that all ranks do together."""
        if not self._is_apart:
            self.trace.exchanges.append(Exchange(what, *user_call()))

    def _exchanged(self, collective: Collective) -> None:
        name, compares = collective.name, True
        for frame in frames():
            filename = frame.f_code.co_filename
            if "/torch/distributed/fsdp/" in filename:
                return  # `watch_calls` tells of whole forwards and backwards
            if filename.endswith("/distributed_c10d.py"):
                name = frame.f_code.co_name
            if filename == torch_distributed.__file__ or "object" in name or name.startswith(("barrier", "all_to_all")):
                compares = False  # `RehearsedCollectives.verify` has; objects, and what goes to each, have other sizes
            if is_users_file(filename):
                break
        if not collective.is_of_all:
            self.note("what only some ranks exchange, in a group of their own or by send and recv, is not compared")
            return
        if self._tape is not None:
            if name == "barrier":  # what rank 0 has written before it can be read behind it
                self._tape.of_rank_0(name)
            elif collective.source == 0:
                self._tape.carry(collective, self._ranks, self.trace.rank)
        self.tell(f"{name} of {', '.join(map(described, collective.compared))}" if compares else name)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let ranks do what they like in a block, as where they join with uneven inputs."""
        self.tell("join_uneven_inputs")
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False
        self.tell("the end of join_uneven_inputs")

    def _read(self) -> None:
        """Write down the line that reads a number which was not computed."""
        if not self.is_fast:
            return
        found: Line | None = None
        for frame in frames():
            filename = frame.f_code.co_filename
            if "/torch/utils/data/" in filename or (found is None and is_ours(filename)):
                return  # of a row, which is real, or of what ranks exchange
            if found is None and is_users_file(filename):
                found = filename, frame.f_lineno
        if found is not None:
            self.trace.invented[found] = self.trace.invented.get(found, 0) + 1

    # -- rows, steps and rates

    def placement(self, place: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Begin a pass over a prepared loader; return what places its batches. Asked in place of ``place`` alone."""
        begun = Pass(user_line())
        self.trace.passes.append(begun)

        def placed(batch: Any) -> Any:
            rows = count_rows(batch.batch if type(batch) is LastBatch else batch) or 0
            begun.rows.append(rows)
            begun.since_step += rows
            self._pass = begun
            return batch if place is None else place(batch)

        return placed

    def watched(self, step: OptimizerStep) -> OptimizerStep:
        """Return what takes the steps of a prepared optimizer. Asked in place of ``step`` alone."""
        self._steps.append(0)
        self.trace.rates.append([])
        return _WatchedStep(step, len(self._steps) - 1, self)

    def stepped(self, number: int, rate: float) -> None:
        """Write down a step of an optimizer, after it was taken."""
        self.trace.rates[number].append(rate)
        if number == 0:
            self.trace.step_rows.append(self._pass.since_step)
            self._pass.since_step = 0
        self._pass.steps += 1
        self._steps[number] += 1
        done = min(filter(None, self._steps))
        if done == 1 and not self._is_timed:
            self._is_timed = True
            took = time.monotonic() - self._began
            self.is_fast = self._tape is not None and bool(self._tape.of_rank_0(took > _LONG))
        self.is_fast = self.is_fast or done >= _COMPUTED_STEPS

    def watch_model(self, model: Any, *, is_sharded: bool) -> None:
        """Watch the calls of a prepared model."""
        if hasattr(model, "_orig_mod"):
            self.note("torch.compile: the model was rehearsed without being compiled")
        watch_calls(model, self.tell, lambda: self.is_fast, is_sharded=is_sharded)

    def note(self, text: str) -> None:
        """Write down, once, what could not be rehearsed."""
        if text not in self.trace.notes:
            self.trace.notes.append(text)

    # -- checkpoints

    def saves(self, folder: Path, collectives: Collectives) -> None:
        """Do what ranks do together when they save to a folder, and write nothing."""
        if collectives.world_size > 1:
            self.tell("save_state")
        self._saved.add(str(Path(folder).absolute()))

    def loads(self, folder: Any) -> bool:
        """Return whether a folder, or the newest, was saved in this rehearsal, so that there is nothing to load."""
        newest = folder is None or folder == "latest"
        if not (self._saved if newest else str(Path(folder).absolute()) in self._saved):
            return False
        self.tell("load_state")
        return True


class _WatchedStep(OptimizerStep):
    """Takes the steps of an optimizer while anything is computed, and tells of all."""

    def __init__(self, step: OptimizerStep, number: int, recorder: Recorder) -> None:
        super().__init__(step.optimizer)
        self._step = step
        self._number = number
        self._recorder = recorder

    @property
    @override
    def skipped(self) -> bool:  # type: ignore[override]
        return self._step.skipped and not self._recorder.is_fast

    @property
    @override
    def unscales(self) -> bool:  # type: ignore[override]
        return self._step.unscales and not self._recorder.is_fast

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        rate = float(self.optimizer.param_groups[0]["lr"])
        if closure is not None:  # how often it is called depends on values, which are not those of a run
            self._recorder.note("an optimizer with a closure, such as LBFGS: it was called once a step, and took none")
            taken: Any = closure()
        else:
            taken = None if self._recorder.is_fast else self._step()
        self._recorder.stepped(self._number, rate)
        return taken

    @override
    def unscale(self) -> None:
        if not self._recorder.is_fast:
            self._step.unscale()

    @override
    def discard(self) -> None:
        self._step.discard()
