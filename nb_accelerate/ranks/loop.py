"""The one loop that waits for everything that can happen to ranks.

::

    channel  --> Ready, Result, Display, InputRequest ... --+
    stdout, stderr --> the cell's output           |
    stacks   --> where a rank is                   +--> one selector, in one thread --> requests --> done
    status   --> a rank has ended                  |
    wake     --> what other threads post ----------+
    deadlines -------------------------------------+

A launch runs it in the calling thread, until its request is done (`run`); a pool in a thread of its own (`start`).
Everything below the public methods runs in that thread, so nothing here needs a lock but the queue of what is posted.

It is one long class since all of it happens in one thread to the same ranks and requests.

What fails in showing output costs output (`GuardedOutput`). A rank whose messages cannot be read is killed, and its
death told like any other. If a thread of its own ends before its time, it kills the ranks, and every wait fails at
once.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, ClassVar

from nb_accelerate.errors import PoolError
from nb_accelerate.protocol.messages import DebuggerResumed, Display, InputRequest, Ready
from nb_accelerate.ranks.failures import oom_kills
from nb_accelerate.ranks.guard import OutputGuard
from nb_accelerate.ranks.hang import HangWatch
from nb_accelerate.ranks.input_requests import PendingInput
from nb_accelerate.ranks.posted import Posted
from nb_accelerate.ranks.process_watch import ProcessWatch
from nb_accelerate.ranks.request import Awaits
from nb_accelerate.ranks.sources import Sources
from nb_accelerate.ranks.steps import StepKind
from nb_accelerate.ranks.timeouts import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.protocol.output import StreamName
    from nb_accelerate.ranks.guard import GuardedOutput
    from nb_accelerate.ranks.proxy import RankProxy
    from nb_accelerate.ranks.request import Request
    from nb_accelerate.ranks.timeouts import Timeouts

logger = logging.getLogger(__name__)

_GATHER = 0.0003
"""Seconds to let output gather when two lots of it follow one another faster than that."""

_ENOUGH = 1 << 13
"""Bytes of output that are worth waking up for."""

_OOM_KILLS_AGE = 1.0
"""Seconds for which a count of the out-of-memory killer's victims is taken for the one of now."""

_CLOSING = 5.0
"""Seconds for the thread to end; longer only if it writes to a rank that does not read."""


class RankLoop:
    """Ranks that were started, and what waits for them. `close` it.

    Args:
        monitor_interval: seconds between two looks for ranks that somebody has stopped, which sends no event; None
            looks only while ranks are being ended.
        monitor: called at each of these looks.
        on_loss: called, in the thread, when a rank has ended.

    Attributes:
        ranks: by their number.
        output: where what they say goes.
        requests: that were begun and are not done.
        failure: why its thread has ended before its time.
        post: has something done in the thread, see `Posted.post`.
        ended: its thread has.
        observers: called in the thread after each event, before it looks at the deadlines. For tests, and for whoever
            wants to act when something has happened and not at a time.
    """

    observers: ClassVar[list[Callable[[RankLoop], object]]] = []

    def __init__(
        self,
        *,
        monitor_interval: float | None = None,
        monitor: Callable[[], object] = lambda: None,
        on_loss: Callable[[RankProxy], object] = lambda _: None,
    ) -> None:
        self.ranks: dict[int, RankProxy] = {}
        self.output: GuardedOutput | None = None
        self.requests: list[Request] = []
        self.failure: BaseException | None = None
        self._processes = ProcessWatch(monitor_interval, monitor)
        self._on_loss = on_loss
        self._hangs: dict[Request, HangWatch] = {}
        self._unshown = OutputGuard()
        self._ending = False
        self._is_closed = False
        self._printed = False
        self._last_printed = 0.0
        self._oom_kills = 0
        self._oom_kills_read_at = -NEVER
        self._thread: threading.Thread | None = None
        self._sources = Sources(lambda _: self._posted.run())
        self._posted = Posted(lambda: self._sources.ring(b"!"))
        self.post = self._posted.post
        self.ended = self._posted.ended

    # For other threads.

    def start(self) -> None:
        """Run in a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, name="nb_accelerate-ranks", daemon=True)
        self._thread.start()

    def run(self, request: Request) -> None:
        """Run in the calling thread until a request, which was begun, is done."""
        while not request.done.is_set():
            self._wait_once()

    def add(self, rank: RankProxy) -> None:
        """Watch over a rank that was started; it takes the place of one that has ended.

        The rank is the loop's from here on, also if this fails.

        Raises:
            PoolError: the thread has ended.
        """
        try:
            self._do(lambda: self._add(rank))
        except BaseException:  # also one that broke off the wait for it
            self.post(lambda: self._remove(rank), lambda: self._let_go(rank))
            raise

    def remove(self, rank: RankProxy) -> None:
        """Forget a rank that has ended.

        Raises:
            PoolError: the thread has ended.
        """
        self._do(lambda: self._remove(rank))

    def begin(self, request: Request, output: GuardedOutput | None = None, *, hangs: Timeouts | None = None) -> None:
        """Ask ranks to do something: at once if there is no thread of its own, which is for the one that calls `run`.

        If the thread has ended, the request is done at once, and has failed.

        Args:
            request: what to ask.
            output: where what all ranks say goes from now on, also after the request; None leaves it as it is.
            hangs: say who waits for whom when nothing moves for so long; None never does.
        """
        if self._thread is None:
            self._begin(request, output, hangs)
        else:
            self.post(lambda: self._begin(request, output, hangs), lambda: request.fail(self.why_it_ended))

    def interrupt(self, *requests: Request, kind: StepKind = StepKind.INTERRUPT, how: str = "interrupted") -> None:
        """End the first of these requests that is not done. Any thread, also a signal handler.

        Args:
            requests: in the order in which they are begun.
            kind: the step to go to.
            how: what the user has done.
        """
        self.post(lambda: self._interrupt(requests, kind, how))

    def say(self, line: str) -> None:
        """Tell the user something, where the last output went. In the thread itself too."""
        self.post(lambda: self.output.say(line) if self.output else None)

    def close(self) -> None:
        """End the thread, kill the ranks that live, and let go of all. Can be repeated."""
        self._ending = True
        if self._thread is not None:
            self.post(lambda: None)
            self._thread.join(_CLOSING)
            if self._thread.is_alive():
                # What it holds cannot be closed under its hands. It is told to end, and does when it can.
                frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - the documented way to it
                place = "".join(traceback.format_stack(frame)) if frame else "unknown"
                logger.warning("The thread that listens to the ranks does not end; it is left to itself, at\n%s", place)
                return
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self.ranks.values():
            self._kill(rank)
        while self.ranks:
            self.ranks.popitem()[1].close()
        self._sources.close()

    @property
    def why_it_ended(self) -> PoolError:
        """What to raise for whoever still wants something of it."""
        if self.failure is None:
            return PoolError("the ranks were stopped")
        error = PoolError(
            f"the thread that listens to the ranks has failed ({type(self.failure).__name__}: {self.failure}), so they "
            f"were ended, and their variables are lost. To start new ones: %distributed start"
        )
        error.__cause__ = self.failure
        return error

    def _do(self, action: Callable[[], object]) -> None:
        """Do something in the thread, and wait until it is done."""
        if self._thread is None:
            action()
        else:
            self._posted.do(action, lambda: self.why_it_ended)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._wait_once()
        except BaseException as error:
            logger.exception("The thread that listens to the ranks has failed; they are ended.")
            self.failure = error
            for rank in list(self.ranks.values()):
                self._kill(rank)
        finally:
            for request in self.requests:
                request.fail(self.why_it_ended)
            self._posted.end()

    def _wait_once(self) -> None:
        self._act_on_deadlines()
        self._sources.wait(self._next_deadline() - time.monotonic())
        self._finish_requests()
        for observer in self.observers:
            observer(self)
        self._let_output_gather()

    def _let_output_gather(self) -> None:
        """Where ranks print without end, read in lots: waking up for every line takes time from the ranks."""
        if not self._printed:
            return
        now = time.monotonic()
        if now - self._last_printed < _GATHER:
            time.sleep(_GATHER)
        self._last_printed, self._printed = now, False

    def _add(self, rank: RankProxy) -> None:
        handle = rank.handle
        try:
            for source, action in (
                (handle.channel, self._on_channel),
                (handle.stdout, self._on_stdout),
                (handle.stderr, self._on_stderr),
                (handle.stacks, self._on_stacks),
                (handle.status, self._on_status),
            ):
                self._sources.add(source, functools.partial(action, rank))
        except BaseException:
            self._forget(rank)
            raise
        self.ranks[rank.rank] = rank

    def _remove(self, rank: RankProxy) -> None:
        self._forget(rank)
        self._let_go(rank)

    def _let_go(self, rank: RankProxy) -> None:
        if self.ranks.get(rank.rank) is rank:
            del self.ranks[rank.rank]
        rank.close()

    def _forget(self, rank: RankProxy) -> None:
        handle = rank.handle
        for source in (handle.channel, handle.stdout, handle.stderr, handle.stacks, handle.status):
            self._sources.drop(source)

    def _begin(self, request: Request, output: GuardedOutput | None, hangs: Timeouts | None) -> None:
        if output is not None and output is not self.output:
            if self.output is not None:
                self.output.close()
            self.output = output
        for rank in request.ranks:
            rank.output.alone = self.output is not None and self.output.alone
        self.requests.append(request)
        request.oom_kills_before = self._recent_oom_kills()
        request.begin()
        if hangs is not None:
            self._hangs[request] = HangWatch(request, hangs)

    def _recent_oom_kills(self) -> int:
        """Not read for each of many short cells: that would take a tenth of their time."""
        now = time.monotonic()
        if now - self._oom_kills_read_at > _OOM_KILLS_AGE:
            self._oom_kills, self._oom_kills_read_at = oom_kills(), now
        return self._oom_kills

    def _interrupt(self, requests: tuple[Request, ...], kind: StepKind, how: str) -> None:
        for request in requests:
            if request in self.requests:
                request.interrupt(kind, how)
                return
            if not request.done.is_set():
                request.is_unwanted = True
                return

    def _finish_requests(self) -> None:
        for request in [one for one in self.requests if not one.waiting]:
            for rank in request.ranks:
                self._show(rank.output.finish)
            for callback in request.callbacks:
                self._show(callback)
            if self.output is not None:
                self.output.finish()
            if request.panel is not None:
                self._show(request.finish_panel)
            self.requests.remove(request)
            self._hangs.pop(request, None)
            request.take_note()
            request.finish()

    def _show(self, action: Any, *arguments: Any) -> None:
        """Do what is for the eye, and may fail."""
        with self._unshown if self.output is None else self.output.guard:
            action(*arguments)

    # Deadlines.

    def _next_deadline(self) -> float:
        due = min(self._processes.due, self.output.due if self.output else NEVER)
        for request in self.requests:
            due = min(due, request.due, request.panel.due if request.panel else NEVER)
        for hang in self._hangs.values():
            due = min(due, hang.due)
        return due

    def _act_on_deadlines(self) -> None:
        if any(one.is_being_ended for one in self.requests):
            self._processes.look_soon()
        if self._next_deadline() > time.monotonic():
            return
        # What has come by now is not late, however long this thread was kept from reading it.
        self._sources.wait(0.0)
        self._finish_requests()
        now = time.monotonic()
        for request in self.requests:
            if request.due <= now:
                request.act()
        for request, hang in list(self._hangs.items()):
            if hang.due <= now:
                self._show(hang.act)
                if hang.due <= now:  # it did not come to its end
                    del self._hangs[request]
        if self.output is not None and self.output.due <= now:
            self.output.flush()
        for request in self.requests:
            if request.panel is not None and request.panel.due <= now:
                request.panel.refresh()
        if self._processes.due <= now:
            self._look_at_processes()

    def _look_at_processes(self) -> None:
        has_panel = any(one.panel is not None for one in self.requests)
        is_ending = any(one.is_being_ended for one in self.requests)
        say = (lambda _: None) if has_panel else self.say  # a panel says so by itself
        for rank in self._processes.look([*self.ranks.values()], say, is_ending=is_ending):
            self._lose(rank)

    # What ranks do.

    def _on_channel(self, rank: RankProxy) -> None:
        self._receive(rank)
        self._handle_messages(rank)

    def _receive(self, rank: RankProxy) -> None:
        """Take what has come. Displays wait for their place in the output, the rest for the end of it."""
        if rank.handle.channel not in self._sources:
            return
        try:
            messages, is_open = rank.handle.channel.drain()
        except Exception as error:  # what it sent may have been its answer: nobody could wait for it any more
            self._cannot_read(rank, error)
            return
        if not is_open:
            self._sources.drop(rank.handle.channel)
        for message, fds in messages:
            if isinstance(message, Display):
                rank.displays.append(message)
            else:
                rank.inbox.append((message, fds))

    def _handle_messages(self, rank: RankProxy) -> None:
        while rank.inbox:
            message, fds = rank.inbox.popleft()
            self._read_rest(rank)
            request = self._request_of(rank)
            if isinstance(message, Ready):
                rank.is_ready = True
                rank.handle.pid = message.pid
                if request is not None:
                    request.ready(rank)
            elif isinstance(message, InputRequest):
                self._on_input_request(PendingInput(rank, message), request)
            elif isinstance(message, DebuggerResumed):
                if request is not None:
                    request.input_requests.goes_on(rank.rank)
            elif request is not None:
                request.answered(rank, message, fds)
            else:  # of one that was given up
                for fd in fds:
                    os.close(fd)

    def _request_of(self, rank: RankProxy) -> Request | None:
        """The request that a message of this rank is about."""
        return next((one for one in self.requests if one.awaits is not Awaits.END and rank in one.waiting), None)

    def _on_input_request(self, asked: PendingInput, request: Request | None) -> None:
        """A debugger wants a line. What was printed before is to be seen first."""
        if self.output is not None:
            self.output.finish()
        is_ending = request is not None and request.step is not None
        if request is not None and request.attended and not is_ending:
            request.input_requests.put(asked)
            return
        if self.output is not None and not is_ending:
            self.output.say(f"rank {asked.rank.rank} asks for input, which a cell in the background cannot have")
        asked.answer(None)

    def _on_stdout(self, rank: RankProxy) -> None:
        data = self._read(rank.handle.stdout)
        self._show(rank.output.feed, data)
        self._printed = self._printed or len(data) < _ENOUGH
        self._moved(rank)
        self._handle_messages(rank)

    def _on_stderr(self, rank: RankProxy) -> None:
        self._take_stderr(rank, self._read(rank.handle.stderr))
        self._moved(rank)

    def _take_stderr(self, rank: RankProxy, data: bytes) -> None:
        # Once connections were broken, C++ code complains about that at length.
        if not any(StepKind.CUT in one.taken for one in self.requests):
            self._show(rank.output.feed_stderr, data)

    def _moved(self, rank: RankProxy) -> None:
        for hang in self._hangs.values():
            hang.moved()
        if self.output is not None:
            self.output.redrawing(rank.rank, rank.output.unfinished("stderr"))
            self.output.redrawing(rank.rank, rank.output.unfinished("stdout"))

    def _on_stacks(self, rank: RankProxy) -> None:
        rank.take_stacks(self._read(rank.handle.stacks))

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""

    def _on_status(self, rank: RankProxy) -> None:
        self._on_channel(rank)
        self._read_rest(rank)
        self._sources.drop(rank.handle.status)
        try:
            rank.handle.read_end()
        except OSError:  # it has ended all the same, nobody knows how
            rank.handle.ended = True
        self._show(rank.output.finish)
        if not rank.why_lost:  # else that was told
            self._lose(rank)

    def _lose(self, rank: RankProxy) -> None:
        """A rank has ended, or is of no use any more."""
        rank.has_answered.set()
        self._show(self._on_loss, rank)
        for request in self.requests:
            if rank in request.ranks:
                request.ended(rank)

    def _cannot_read(self, rank: RankProxy, error: Exception) -> None:
        logger.warning("A message of rank %s cannot be read; it is killed.", rank.rank, exc_info=error)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        rank.why_lost = f"what it sent to the notebook cannot be read ({said}), so it was killed"
        rank.lost_by = error
        self._sources.drop(rank.handle.channel)
        self._kill(rank)
        self._lose(rank)

    def _kill(self, rank: RankProxy) -> None:
        try:
            rank.handle.kill()
        except Exception:
            logger.warning("Rank %s could not be killed.", rank.rank, exc_info=True)

    def show_text(self, rank: RankProxy, stream: StreamName, text: str) -> None:
        """Show lines of a rank; called by its output."""
        if self.output is not None:
            self.output.text(rank.rank, stream, text)

    def show_display(self, rank: RankProxy) -> None:
        """Show the next display of a rank, whose place in its output has come; called by its output."""
        if not rank.displays:
            self._receive(rank)  # it was sent before its place was marked, so it is there
        if rank.displays:
            display = rank.displays.popleft()
            if self.output is not None:
                self.output.display(rank.rank, display)

    def _read_rest(self, rank: RankProxy) -> None:
        """Read everything that a rank wrote before it answered, or ended."""
        handle = rank.handle
        for fd, take in (
            (handle.stdout, functools.partial(self._show, rank.output.feed)),
            (handle.stderr, functools.partial(self._take_stderr, rank)),
            (handle.stacks, rank.take_stacks),
        ):
            # What was there when this began, and no more: a rank may print faster than is read here.
            left = self._sources.num_waiting(fd)
            while left > 0 and (data := self._read(fd)):
                take(data)
                left -= len(data)
