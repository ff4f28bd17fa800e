"""The loader that a rank iterates.

A batch goes forward through these steps::

    read -> look ahead -> note what is known of the last group -> place on the device -> yield

`training.data.reading.reader` reads; the steps after that are those of `DataLoaderShard.__iter__`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.base.devices import find_kind
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.training.data.adapter import DataLoaderAdapter
from nb_accelerate.training.data.loops import DataLoaderStateMixin, LoaderView
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.process import context
from nb_accelerate.training.process.rng import RNGType
from nb_accelerate.training.pytree import map_tensors, send_to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from nb_accelerate.training.data.loops import RunningLoops
    from nb_accelerate.training.data.resuming.epochs import EpochProgress


# A line of a cell that is no Python: `%%distributed`, `!pip ...`.
_MAGIC = re.compile(r"^([ \t]*)[%!].*$", re.MULTILINE)


def epoch_of(frame: FrameType | None) -> tuple[int, int] | None:
    """Return which epoch it is, from 1, of how many, by the loops that code is in; None if there is a doubt.

    What it says is shown, and nothing depends on it: ``for epoch in range(10)`` around the only loop over a loader.
    """
    found: list[tuple[FrameType, ast.stmt]] = []
    is_innermost = True
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
            over_loader, around = _loops_at(source, frame.f_lineno)
            # What may end before its loader is no epoch.
            if is_innermost and (
                over_loader is None or any(isinstance(node, (ast.Break, ast.Return)) for node in ast.walk(over_loader))
            ):
                return None
            is_innermost = False
            found += [(frame, loop) for loop in around]
        frame = frame.f_back
    return _in_range(*found[0]) if len(found) == 1 else None


@functools.lru_cache(maxsize=64)
def _loops_at(source: str, line: int) -> tuple[ast.stmt | None, Sequence[ast.stmt]]:
    """Return the loop that begins at a line, and the loops around that line in the same function."""
    try:
        nodes = [*ast.walk(ast.parse(_MAGIC.sub(r"\1pass", source)))]
    except (SyntaxError, ValueError, RecursionError):  # a file that has changed since it was imported, say
        return None, ()
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    since = max((node.lineno for node in functions if _spans(node.body, line)), default=0)
    loops = [node for node in nodes if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and node.lineno >= since]
    begins = [
        node for node in loops if isinstance(node, ast.For) and node.lineno <= line <= (node.iter.end_lineno or 0)
    ]
    return (begins[-1] if begins else None), [node for node in loops if _spans(node.body, line) and node not in begins]


def _spans(body: Sequence[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _in_range(frame: FrameType, loop: ast.stmt) -> tuple[int, int] | None:
    """Return the number of the pass of a loop, from 1, and of how many, if it is one over a range of known ends."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
        return None
    call = loop.iter
    if not isinstance(call.func, ast.Name) or call.func.id != "range" or len(call.args) not in (1, 2):
        return None
    *begin, end = (_value(argument, frame) for argument in call.args)
    start, now = (begin or [0])[0], _value(loop.target, frame)
    if not all(type(number) is int for number in (start, now, end)) or not start <= now < end:
        return None
    return now - start + 1, end - start


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Return the value of a number, a name, an attribute of a name, or a sum; None of all else. Runs no user's code."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        names = frame.f_locals
        value = names.get(node.id, frame.f_globals.get(node.id))
        # Until Python 3.13 a frame keeps this dictionary, and so the user's model, until it ends. It is emptied if no
        # other than the frame, this name and the call below refer to it: `locals()` has given it to the program, too.
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13) and sys.getrefcount(names) == 3:
            names.clear()
        return value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return inspect.getattr_static(_value(node.value, frame), node.attr, None)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_value(part, frame) for part in (node.left, node.right)]
        return sum(parts) if all(type(part) is int for part in parts) else None
    return None


class DataLoaderShard(DataLoaderStateMixin, DataLoaderAdapter):
    """A `torch.utils.data.DataLoader` that yields the batches of one rank. Made by `prepare_data_loader`.

    It reads one batch ahead, to know while a batch is used whether it is the last. accelerate reads ahead as well, so
    random augmentations draw the same numbers.

    Args:
        dataset: the user's, or this rank's part of an iterable one.
        device: where batches go; None leaves them where they are.
        gradient_state: has the `RunningLoops` that are told when an epoch begins and ends; a new one by default.
        rng_types: which random states are set to those of rank 0 before each epoch.
        on_start: called before each epoch to set them.
        rows: length of the user's dataset; None if it has none.
        total_batch_size: rows of all ranks together in one step.
        non_blocking: do not wait for copies to the device; batches are then sent there one ahead.
        prepared: whether its rows are divided among ranks already, so that `prepare_data_loader` returns it as it is.
        **kwargs: those of `DataLoaderAdapter`.

    Attributes:
        gradient_state: the position of the loop in its loaders and, of an `Accelerator`, in its accumulation window.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | None = None,
        gradient_state: LoaderView | None = None,
        rng_types: Sequence[RNGType] = (),
        on_start: Callable[[], None] | None = None,
        rows: int | None = None,
        total_batch_size: int | None = None,
        non_blocking: bool = False,
        prepared: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, **kwargs)
        self.device = device
        self.prepared = prepared
        self.gradient_state = gradient_state or LoaderView()
        self._loops = self.gradient_state.loops
        self._rng_types = rng_types
        self._on_start = on_start
        self._rows = rows
        self._total_batch_size = total_batch_size
        self._non_blocking = non_blocking

    @property
    def even(self) -> bool:
        """Whether all ranks get equal batches at the end of the data."""
        return self._reader.even

    @even.setter
    def even(self, value: bool) -> None:
        self._reader.even = value

    @property
    def rng_types(self) -> list[RNGType]:
        """Which random states are set to those of rank 0 before each epoch, without generators that do not exist."""
        generator = self.synchronized_generator
        return [kind for kind in self._rng_types if kind is not RNGType.GENERATOR or generator is not None]

    @property
    def synchronized_generator(self) -> torch.Generator | None:
        """The generator of the sampler or dataset that is set to the state of rank 0's; None if there is none."""
        called = (self._on_start, getattr(self._reader.shard, "on_start", None))
        found = (getattr(sync, "generator", None) for sync in called)
        return next((generator for generator in found if generator is not None), None)

    @property
    def total_batch_size(self) -> int:
        """Rows of all ranks together in one step.

        Raises:
            TypeError: batches of this loader have no fixed size.
        """
        if self._total_batch_size is None:
            raise TypeError("the batches of this loader have no fixed size")
        return self._total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Rows of the whole dataset, before it was shared out.

        Raises:
            TypeError: the dataset does not say how long it is.
        """
        if self._rows is None:
            raise TypeError(f"{type(self.dataset).__name__} does not say how long it is")
        return self._rows

    @property
    @override
    def end_of_dataloader(self) -> bool:  # type: ignore[override]  # set by the epoch that is in progress
        """Whether the batch handed out is the last."""
        return self._progress.end_of_dataloader

    @property
    @override
    def remainder(self) -> int:  # type: ignore[override]  # likewise
        """Real rows (not copies) in the last batch of all ranks together; 0 if all are real, -1 if not known."""
        return self._progress.remainder

    @property
    def batch_remainder(self) -> int | None:
        """Real rows in the current batch of all ranks together; None if all its rows are real."""
        rows = self._progress.rows
        return None if rows is None else rows.real

    @override
    def _start(self) -> None:
        if self._on_start is not None:
            self._on_start()

    def track(self, loops: RunningLoops) -> None:
        """Report epochs to these from now on. Called by ``prepare``."""
        self._loops = loops

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator, so that leaving the loop is seen
        evaluates = not torch.is_grad_enabled()
        self.epochs.announce()
        page = here()
        enter, step = page.enter, page.step
        if page.is_read and not evaluates:
            page.guess_epoch(epoch_of(sys._getframe(1)))  # noqa: SLF001 - as `warnings` does
        reads, work = Phase.DATA, partial(enter, Phase.EVALUATING) if evaluates else page.begin_work
        batches = self._known_length()
        loop = page.begin_loop(
            total=None if batches is None else batches + self.skip_batches,
            rows=self._total_batch_size,
            epoch=self.iteration + 1,
            evaluates=evaluates,
            step=self._first_position,
            num_workers=self._reader.source.loader.num_workers,
        )
        enter(reads)
        progress, loops = None, self._loops
        try:
            progress, reading = self._begin()
            loops.begin(progress)
            if progress.reader.source.is_stateful:
                reading = _with_read_states(reading, progress)
            try:
                current = next(reading)
            except StopIteration:
                return
            kind = None if self.device is None else find_kind(self.device.type)
            make = None if kind is None else kind.end_step
            end_step: Callable[[int, Any], None] = (lambda _step, _batch: None) if make is None else make()
            late = place = _placement(current, self.device, non_blocking=self._non_blocking)
            if (rehearsal := context.rehearsal()) is not None:
                late = place = rehearsal.placement(place)
            if place is not None and self._non_blocking:
                # Asynchronous copies start as early as possible; others as late as possible, so that only one batch at
                # a time takes memory of the device.
                current, late, reading = place(current), None, map(place, reading)
            position = progress.position
            for upcoming in reading:
                position += 1
                progress.position = position
                if loops.active is not progress:
                    loops.advance(progress)
                step(position)
                work()
                if type(current) is LastBatch:  # of one worker of several; others go on
                    progress.rows, current = current.rows, current.batch
                    yield current if late is None else late(current)
                    progress.rows = None
                else:
                    yield current if late is None else late(current)
                end_step(position, current)
                current = upcoming
                enter(reads)
            progress.end_of_dataloader = True
            progress.position = 0
            if loops.active is not progress:
                loops.advance(progress)
            step(position + 1)
            work()
            last = progress.reader.last(current)
            progress.rows, current = last.rows, last.batch
            yield current if late is None else late(current)
            end_step(position + 1, current)
        finally:
            page.end_loop(loop)
            if progress is not None:
                self._end(progress)
                loops.end(progress)

    def extent(self) -> tuple[int, int] | None:
        """Return the rows of the dataset and the batches of this rank, or None if ranks may differ in them."""
        batches = self._known_length() if self._reader.compares_lengths else None
        return None if batches is None or self._rows is None else (self._rows, batches)

    def _known_length(self) -> int | None:
        """Return the length of this loader if it has one."""
        # torch warns for each batch beyond a length that was asked for. Users did not ask here, so its mark is
        # restored.
        loader = self._reader.source.loader
        asked = loader._IterableDataset_len_called  # noqa: SLF001 - torch's
        try:
            return len(self._reader)
        except Exception:  # a dataset's own, as when the loader was prepared
            return None
        finally:
            loader._IterableDataset_len_called = asked  # noqa: SLF001 - torch's


def _with_read_states(batches: Iterator[Any], progress: EpochProgress) -> Iterator[Any]:
    """Yield batches; store in ``progress``, before each is read, the state of reading after the one handed out last."""
    reader = progress.reader
    while True:
        progress.read_state = reader.read_state()
        try:
            batch = next(batches)
        except StopIteration:
            progress.read_state = reader.end_state()
            return
        yield batch


def _placement(first: Any, device: torch.device | None, *, non_blocking: bool) -> Callable[[Any], Any] | None:
    """Return a function that moves batches to a device, or None if batches are there already."""
    # If the first batch is on the CPU, and that is the device, later ones are taken to be there too.
    if device is None:
        return None
    if device.type == "cpu":
        if _is_on_cpu(first.batch if type(first) is LastBatch else first):
            return None
        non_blocking = False  # the batch would be read before it has come from its device

    def place(batch: Any) -> Any:
        if type(batch) is LastBatch:
            return replace(batch, batch=send_to_device(batch.batch, device, non_blocking=non_blocking))
        return send_to_device(batch, device, non_blocking=non_blocking)

    return place


def _is_on_cpu(batch: Any) -> bool:
    """Return whether all tensors of a batch are on the CPU, and it has no other objects that move themselves."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.is_cpu  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        return all(map(_is_on_cpu, batch))
    leaves: list[Any] = []
    map_tensors(leaves.append, batch, movable=True)
    return all(isinstance(leaf, torch.Tensor) and leaf.is_cpu for leaf in leaves)
