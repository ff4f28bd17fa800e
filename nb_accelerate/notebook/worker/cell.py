"""A rank that stays: it joins the others in a process group, and runs cells.

::

    Join    -> leave old groups -> the store they meet through -> new group -> models moved to it -> rank, device ...
    RunCell -> names that came along -> the shell -> CellEnd: value or failure, what was bound, steps of each group
"""

from __future__ import annotations

import ast
import gc
import os
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.progress_page import here
from nb_accelerate.base.seam import group_replaced, training_half
from nb_accelerate.notebook.protocol.main_module import main_globals
from nb_accelerate.notebook.protocol.messages import NOTHING, CellEnd, Join, Result
from nb_accelerate.notebook.protocol.shipping import RETURNABLE, closed_on_error, pack
from nb_accelerate.notebook.worker.call import answer, exits_well, fail
from nb_accelerate.notebook.worker.debugger import InputRequests, debug_with
from nb_accelerate.notebook.worker.groups import collectives_of_groups
from nb_accelerate.notebook.worker.namespace import is_hidden
from nb_accelerate.notebook.worker.received import received
from nb_accelerate.notebook.worker.shell import DisplayPort, clear_frames_out_of_memory, make_shell
from nb_accelerate.notebook.worker.trained_models import trained_models

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from nb_accelerate.notebook.protocol.channel import Channel
    from nb_accelerate.notebook.protocol.messages import Failure, RunCell
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.worker.alarm import Alarm
    from nb_accelerate.notebook.worker.interrupt import InterruptGate

_SMALL = frozenset({bool, int, float, str, type(None)})
# Types without weak references. They are asked about first because an error for each would take most of the time.
_CONTAINERS = frozenset({list, tuple, dict})


class Bindings:
    """The variables of a rank before a cell. None is kept alive.

    A cell that deletes a model to make room for another must get the memory while it runs, so no reference to the model
    is held, but a weak one where its type supports that. Of others (lists, tuples, dicts) the address is kept. A later
    object may get the same address, so that the source of the cell is asked too whether it binds the name again.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._references: dict[str, weakref.ref[Any]] = {}
        self._values: dict[str, Any] = {}  # numbers and texts: they hold no other objects
        self._addresses: dict[str, int] = {}
        for name, value in names.items():
            self.add(name, value)

    def add(self, name: str, value: Any) -> None:
        """Add a variable that the cell does not count as having bound."""
        if type(value) in _SMALL:
            self._values[name] = value
            return
        if type(value) in _CONTAINERS and gc.is_tracked(value):
            self._addresses[name] = id(value)
            return
        try:
            self._references[name] = weakref.ref(value)
        except TypeError:
            if gc.is_tracked(value):
                self._addresses[name] = id(value)
            else:
                self._values[name] = value

    def bound(self, names: Mapping[str, Any], source: str) -> list[str]:
        """Return the names that were bound since then. The source of the cell has magics as calls of functions."""
        found, unclear = [], []
        words = set(re.findall(r"\w+", source))
        for name, value in names.items():
            if name in self._references:
                is_same = self._references[name]() is value
            elif name in self._values:
                is_same = self._values[name] is value
            else:
                is_same = self._addresses.get(name) == id(value)
                if is_same and name in words:
                    unclear.append(name)
            if not is_same:
                found.append(name)
        return found + (sorted(set(unclear) & stored_names(source)) if unclear else [])

    def unbound(self, names: Iterable[str]) -> set[str]:
        """Return the names that are no longer there."""
        return {*self._references, *self._values, *self._addresses}.difference(names)


def stored_names(source: str) -> set[str]:
    """Return the names that a cell assigns to anywhere, also in the arguments of magics such as ``%%time``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found.union(*(stored_names(text) for text in _arguments_of_magics(tree)))


def _arguments_of_magics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
            for argument in node.args[1:]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


# For a collective: somebody may sit at a debugger of one rank, and nccl kills a rank that has waited for longer. Ranks
# that wait in vain are found, and reported, by the pool.
_GROUP_TIMEOUT = timedelta(days=365)


class PersistentRank:
    """Runs cells in one shell, and joins process groups; keeps variables and groups between cells."""

    def __init__(self, channel: Channel, gate: InterruptGate, mark: bytes, alarm: Alarm) -> None:
        self._gate = gate
        self._shell = make_shell(DisplayPort(channel, mark))
        self._names: dict[str, Any] = main_globals()
        debug_with(InputRequests(channel))
        self._training = training_half()
        self._store: object = None
        self._alarm = alarm
        alarm.abort_groups = self._training.abort_groups

    def answer(self, message: Join | RunCell, fds: tuple[int, ...]) -> tuple[object, Packed | None]:
        """Answer a message of the kernel, whose descriptors are taken over."""
        if isinstance(message, Join):
            return answer(lambda: (self._join, (message, fds), {}), self._gate, fds)
        return self._run(message, fds)

    def _join(self, message: Join, fds: tuple[int, ...]) -> str:
        # In this order: the alarm knows the rendezvous before anything waits in it, and how to end waits for its store
        # before the group is made there.
        self._alarm.begin_rendezvous(message.rendezvous)
        self._training.leave_group()
        self._store = None
        os.environ.update(message.environ)
        store = self._training.reach_store(message.store, fds[0] if fds else -1, self._alarm.is_given_up)
        self._alarm.on_given_up(store.give_up)
        self._store = store
        given = self._training.join_group(_GROUP_TIMEOUT)
        group_replaced.fire()
        self._names.update(given)
        return str(given["device"])

    def _run(self, cell: RunCell, fds: tuple[int, ...]) -> tuple[CellEnd, Packed | None]:
        page = here()
        page.begin_request()
        if cell.is_python:  # %debug needs the frames that this clears
            # Outside of the gate: str() of an exception runs users' code, and an interrupt there would be lost.
            clear_frames_out_of_memory()
        before = Bindings(self._names)  # of a cell whose names cannot be unpickled
        has_names = cell.names is None
        value: object = None
        outcome: Result | Failure
        try:
            with self._gate:
                with closed_on_error(fds):
                    self._gate.check()  # before the names: an interrupt may have taken back a part
                # Names first: what came along counts as the notebook's, and not as bound by the cell.
                if cell.names is not None:
                    received.define(cell.names, fds, self._names)
                    has_names = True
                    before = Bindings(self._names)
                if cell.wants_accelerator and "accelerator" not in self._names:
                    self._names["accelerator"] = self._training.make_accelerator()
                    before.add("accelerator", self._names["accelerator"])
                # With --convert gradients are averaged here: it is no mistake that the cell exchanges none.
                trained_models.begin(1 if cell.converts else cell.num_ranks)
                with self._training.converted(self._names) if cell.converts else nullcontext() as converted:
                    result = self._shell.run(cell)
                    if converted is not None and result.success:
                        converted.report()
                trained_models.end()
            error = result.error_before_exec or result.error_in_exec
            value = result.result if cell.wants_value else None
        except BaseException as caught:  # an interrupt that hit between users' lines, or names that cannot be unpickled
            error = caught
        if error is None or (has_names and exits_well(error)):
            page.end_request()
            outcome, packed = self._value(value)
        else:
            outcome, packed = _cell_failed(error)
        # After a failure too: the notebook asks what the cell did before it failed.
        end = CellEnd(
            answer=outcome,
            bound=_visible(before.bound(self._names, self._shell.python_of(cell))),
            unbound=_visible(before.unbound(self._names)),
            steps=collectives_of_groups(),
            trained=_visible(trained_models.among(list(self._names.items()))),
            has_names=has_names,
            gone=received.pop_gone(),
        )
        return end, packed

    def _value(self, value: object) -> tuple[Result | Failure, Packed | None]:
        if value is None:
            return Result(parcel=NOTHING), None
        try:
            packed = pack(value, name="the value of the last expression", advice=f"End the cell with {RETURNABLE}.")
        except BaseException as error:  # users' code takes part: it may also exit
            # The cause's text is in the message, and no line of the user's is in either traceback.
            error.__cause__ = error.__traceback__ = None
            return fail(error, returned=True)
        return Result(parcel=packed.parcel), packed


def _cell_failed(error: BaseException) -> tuple[Failure, Packed | None]:
    failure, packed = fail(error.with_traceback(_without_shell(error.__traceback__)))
    if isinstance(error, SystemExit):
        # Raised in the kernel it would mean the kernel.
        if packed is not None:
            packed.close()
        return replace(failure, parcel=None, result_of_call=False), None
    return failure, packed


_OURS = "/nb_accelerate/notebook/worker/"
_MACHINERY = ("/IPython/", "/asyncio/", "/nb_accelerate/training/in_ranks.py", _OURS)


def _without_shell(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first frame of users' code on, or all of it if there is none."""
    # Frames of this package at its end are cut off too: the user looks for the line of theirs that was interrupted, or
    # that asked for something a rank does not have.
    entries = []
    entry = traceback
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    while entries and _is_machinery(entries[0]):
        entries.pop(0)
    if entries and _OURS in entries[-1].tb_frame.f_code.co_filename:
        while len(entries) > 1 and _is_machinery(entries[-1]):
            entries.pop()
        entries[-1].tb_next = None
    return entries[0] if entries else traceback


def _is_machinery(entry: TracebackType) -> bool:
    return any(part in entry.tb_frame.f_code.co_filename for part in _MACHINERY)


def _visible(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if not is_hidden(name)))
