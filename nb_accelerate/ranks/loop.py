"""The ranks of a pool, and the one thread that listens to them.

::

    channel  --> Ready, Display, Ask ... --+
    stdout, stderr --> the cell's output   |
    stacks   --> where a rank is           +--> one selector, in one thread --> the turn that is on
    status   --> a rank has ended          |
    wake     --> what other threads ask ---+
    deadlines -----------------------------+

Everything below the public methods runs in that thread, so nothing here needs a lock but the queue of requests.

What fails in showing output costs output (`GuardedOutput`). A rank whose messages cannot be read is killed, and its
death told like any other. If the thread itself ends before its time, it kills the ranks, and every wait fails at once.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import PoolError
from nb_accelerate.pool.panel import outcome
from nb_accelerate.protocol.messages import Ask, Display, GoesOn, Parcel, Ready, Result
from nb_accelerate.ranks.display_ids import DisplayIds
from nb_accelerate.ranks.guard import OutputGuard
from nb_accelerate.ranks.hang import HangWatch
from nb_accelerate.ranks.input_requests import Question
from nb_accelerate.ranks.proxy import Member
from nb_accelerate.ranks.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.display import Panel
    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.protocol.output import StreamName
    from nb_accelerate.ranks.guarded import GuardedOutput
    from nb_accelerate.ranks.request import Turn
    from nb_accelerate.ranks.waiting import Interrupts

logger = logging.getLogger(__name__)

_RUSH = 0.0003
"""Seconds between two lots of output that follow one another at once."""

_LUMP = 1 << 13
"""Bytes that are worth waking up for."""

_NEVER = float("inf")

_CLOSING = 5.0
"""Seconds for the thread to end; longer only if it writes to a rank that does not read."""


class Crew:
    """Ranks that were started, and the thread that owns them. `close` it.

    Args:
        on_loss: called, in the thread, when a rank has ended.

    Attributes:
        members: by rank.
        ids: of displays.
        failure: why the thread has ended before its time.
    """

    def __init__(self, on_loss: Callable[[Member], None]) -> None:
        self.members: dict[int, Member] = {}
        self.ids = DisplayIds()
        self.failure: BaseException | None = None
        self._on_loss = on_loss
        self._turn: Turn | None = None
        self._hang: HangWatch | None = None
        self._panel: Panel | None = None
        self._output: GuardedOutput | None = None
        self._unshown = OutputGuard()
        self._on_ends: list[Callable[[], None]] = []
        self._requests: deque[tuple[Callable[[], None], Callable[[], object]]] = deque()
        self._ending = False
        self._has_ended = False
        self._is_closed = False
        self._printed = False
        self._last_printed = 0.0
        self._sources = Sources(self._on_bell)
        self._thread = threading.Thread(target=self._run, name="nb_accelerate-pool", daemon=True)
        self._thread.start()

    # For other threads.

    def add(self, handle: RankHandle) -> Member:
        """Watch over a rank that was started; it takes the place of one that has ended.

        The handle is the crew's from here on, also if this fails.

        Raises:
            PoolError: the thread has ended.
        """
        try:
            member = Member(handle, self._emit, self._on_display)
        except BaseException:
            handle.close()
            raise
        try:
            self._do(lambda: self._add(member))
        except BaseException:  # also one that broke off the wait for it
            self._post(lambda: self._remove(member), lambda: self._let_go(member))
            raise
        return member

    def remove(self, member: Member) -> None:
        """Forget a rank that has ended.

        Raises:
            PoolError: the thread has ended.
        """
        self._do(lambda: self._remove(member))

    def begin(
        self,
        turn: Turn,
        output: GuardedOutput | None = None,
        *,
        watch_for_hangs: bool = False,
        panel: Panel | None = None,
    ) -> None:
        """Ask ranks to do something. One turn at a time: the one before is done.

        If the thread has ended, the turn is done at once, and has failed.

        Args:
            turn: what to ask.
            output: where their output goes from now on, also after the turn.
            watch_for_hangs: say who waits for whom when nothing moves.
            panel: shows how far the ranks are.
        """
        self._post(
            lambda: self._begin(turn, output, panel, watch_for_hangs=watch_for_hangs),
            lambda: turn.fail(self.why_it_ended),
        )

    def interrupt(self, turn: Turn) -> None:
        """End a turn early. Any thread, also a signal handler."""
        self._post(lambda: self._interrupt(turn))

    def say(self, line: str) -> None:
        """Tell the user something, where the last output went. In the thread itself too."""
        self._post(lambda: self._output.say(line) if self._output else None)

    def wait_for_end(self, members: list[Member], seconds: float, interrupts: Interrupts) -> bool:
        """Wait until these ranks have ended, at most so long, and until an interrupt. True if they have."""
        ended = threading.Event()

        def look() -> None:
            if self._has_ended or all(member.handle.ended for member in members):
                ended.set()

        self._post(lambda: self._on_ends.append(look), ended.set)
        self._post(look, ended.set)
        try:
            with interrupts.go_to(ended.set):
                ended.wait(seconds)
        finally:
            self._post(lambda: self._on_ends.remove(look))
        return all(member.handle.ended for member in members)

    def close(self) -> None:
        """End the thread and let go of every rank; those that live see the end of their channels. Can be repeated."""
        self._ending = True
        self._post(lambda: None)
        self._thread.join(_CLOSING)
        if self._is_closed:
            return
        if self._thread.is_alive():
            # What it holds cannot be closed under its hands. It is told to end, and does when it can.
            logger.warning("The thread that listens to the ranks does not end; it is left to itself.")
            return
        self._is_closed = True
        if self._output is not None:
            self._output.close()
        while self.members:
            self.members.popitem()[1].close()
        self._sources.close()

    def _post(self, action: Callable[[], None], refuse: Callable[[], object] = lambda: None) -> None:
        """Have something done in the thread; `refuse` is called instead if that has ended."""
        self._requests.append((action, refuse))
        self._sources.ring(b"!")
        if self._has_ended:  # maybe just now, so that both may see what was asked: each request is taken once
            self._refuse_requests()

    def _refuse_requests(self) -> None:
        while True:
            try:
                _, refuse = self._requests.popleft()
            except IndexError:
                return
            refuse()

    def _do(self, action: Callable[[], object]) -> None:
        """Run something in the thread, wait until it is done, and raise what it raises."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._post(run, lambda: done.set_exception(self.why_it_ended))
        done.result()

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

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._act_on_deadlines()
                self._sources.wait(self._next_deadline() - time.monotonic())
                self._see_whether_turn_is_done()
                self._let_output_gather()
        except BaseException as error:
            logger.exception("The thread that listens to the ranks has failed; they are ended.")
            self.failure = error
            for member in list(self.members.values()):
                self._kill(member)
        finally:
            self._has_ended = True
            if self._turn is not None:
                self._turn.fail(self.why_it_ended)
            for look in list(self._on_ends):
                look()
            self._refuse_requests()

    def _let_output_gather(self) -> None:
        """Where ranks print without end, read in lumps: waking up for every line takes time from the ranks."""
        now = time.monotonic()
        if self._printed and now - self._last_printed < _RUSH:
            time.sleep(_RUSH)
        if self._printed:
            self._last_printed, self._printed = now, False

    def _on_bell(self, _: bytes) -> None:
        while self._requests:
            request = self._requests.popleft()
            try:
                request[0]()
            except BaseException:
                self._requests.appendleft(request)  # whoever waits for it is told when the thread ends
                raise

    def _add(self, member: Member) -> None:
        try:
            for source, action in (
                (member.handle.channel, self._on_channel),
                (member.handle.stdout, self._on_stdout),
                (member.handle.stderr, self._on_stderr),
                (member.handle.stacks, self._on_stacks),
                (member.handle.status, self._on_status),
            ):
                self._sources.add(source, functools.partial(action, member))
        except BaseException:
            self._forget(member)
            raise
        self.members[member.rank] = member

    def _remove(self, member: Member) -> None:
        self._forget(member)
        self._let_go(member)

    def _let_go(self, member: Member) -> None:
        if self.members.get(member.rank) is member:
            del self.members[member.rank]
        member.close()

    def _forget(self, member: Member) -> None:
        handle = member.handle
        for source in (handle.channel, handle.stdout, handle.stderr, handle.stacks, handle.status):
            self._sources.drop(source)

    def _begin(self, turn: Turn, output: GuardedOutput | None, panel: Panel | None, *, watch_for_hangs: bool) -> None:
        assert self._turn is None
        if output is not None and output is not self._output:
            if self._output is not None:
                self._output.close()
            self._output = output
        self._turn, self._panel = turn, panel
        if watch_for_hangs:
            self._hang = HangWatch(turn)
        for member in turn.members:
            member.output.alone = self._output is not None and self._output.alone
        turn.begin()

    def _interrupt(self, turn: Turn) -> None:
        if turn is self._turn:
            turn.interrupt()
        elif not turn.done.is_set():
            turn.is_unwanted = True

    def _see_whether_turn_is_done(self) -> None:
        turn = self._turn
        if turn is None or turn.waiting:
            return
        for member in turn.members:
            self._show(member.output.finish)
        for callback in turn.callbacks:
            self._show(callback)
        if self._output is not None:
            self._output.finish()
        if self._panel is not None:
            panel = self._panel
            self._show(lambda: panel.finish(*outcome(turn)))
        self._turn = self._hang = self._panel = None
        turn.finish()

    def _show(self, action: Callable[..., object], *arguments: Any) -> None:
        """Do what is for the eye, and may fail."""
        with self._unshown if self._output is None else self._output.guard:
            action(*arguments)

    def _next_deadline(self) -> float:
        return min(
            self._turn.due if self._turn else _NEVER,
            self._hang.due if self._hang else _NEVER,
            self._output.due if self._output else _NEVER,
            self._panel.due if self._panel else _NEVER,
        )

    def _act_on_deadlines(self) -> None:
        if self._next_deadline() > time.monotonic():
            return
        # What has come by now is not late, however long this thread was kept from reading it.
        self._sources.wait(0.0)
        self._see_whether_turn_is_done()
        now = time.monotonic()
        if self._turn is not None and self._turn.due <= now:
            self._turn.act()
        if self._hang is not None and self._hang.due <= now:
            hang = self._hang
            self._show(hang.act)
            if hang.due <= now:  # it did not come to its end
                self._hang = None
        if self._output is not None and self._output.due <= now:
            self._output.flush()
        if self._panel is not None and self._panel.due <= now:
            self._panel.refresh()

    # What ranks do.

    def _on_channel(self, member: Member) -> None:
        self._receive(member)
        self._handle_answers(member)

    def _receive(self, member: Member) -> None:
        """Take what has come. Displays wait for their place in the output, the rest for the end of it."""
        if member.handle.channel not in self._sources:
            return
        try:
            messages, is_open = member.handle.channel.drain()
        except Exception as error:  # what it sent may have been its answer: nobody could wait for it any more
            self._cannot_read(member, error)
            return
        if not is_open:
            self._sources.drop(member.handle.channel)
        for message, fds in messages:
            if isinstance(message, Display):
                member.displays.append(message)
            else:
                member.inbox.append((message, fds))

    def _handle_answers(self, member: Member) -> None:
        while member.inbox:
            message, fds = member.inbox.popleft()
            if isinstance(message, Ready):
                member.is_ready = True
                member.handle.pid = message.pid
                message = Result(parcel=Parcel())
            self._read_rest(member)
            if isinstance(message, Ask):
                self._asked(Question(member, message))
            elif isinstance(message, GoesOn):
                if self._turn is not None:
                    self._turn.questions.goes_on(member.rank)
            elif self._turn is not None:
                self._turn.answered(member, message, fds)
            else:  # of one that was given up
                for fd in fds:
                    os.close(fd)

    def _asked(self, question: Question) -> None:
        """A debugger wants a line. What was printed before is to be seen first."""
        if self._output is not None:
            self._output.finish()
        if self._turn is not None and self._turn.attended and self._turn.stage is None:
            self._turn.questions.put(question)
            return
        if self._output is not None and (self._turn is None or self._turn.stage is None):
            self._output.say(f"rank {question.member.rank} asks for input, which a cell in the background cannot have")
        question.answer(None)

    def _on_stdout(self, member: Member) -> None:
        data = self._read(member.handle.stdout)
        self._show(member.output.feed, data)
        self._printed = self._printed or len(data) < _LUMP
        self._moved(member)
        self._handle_answers(member)

    def _on_stderr(self, member: Member) -> None:
        self._take_stderr(member, self._read(member.handle.stderr))
        self._moved(member)

    def _take_stderr(self, member: Member, data: bytes) -> None:
        # Once connections were broken, C++ code complains about that at length.
        if self._turn is None or not self._turn.was_cut:
            self._show(member.output.feed_stderr, data)

    def _moved(self, member: Member) -> None:
        if self._hang is not None:
            self._hang.moved()
        if self._output is not None:
            self._output.redrawing(member.rank, member.output.unfinished("stderr"))
            self._output.redrawing(member.rank, member.output.unfinished("stdout"))

    def _on_stacks(self, member: Member) -> None:
        member.stacks += self._read(member.handle.stacks)

    def _read(self, fd: int) -> bytes:
        try:
            return self._sources.read(fd)
        except OSError as error:
            logger.warning("What a rank prints cannot be read any more: %s", error)
            self._sources.drop(fd)
            return b""

    def _on_status(self, member: Member) -> None:
        self._on_channel(member)
        self._read_rest(member)
        self._sources.drop(member.handle.status)
        try:
            member.handle.read_status()
        except OSError:  # it has ended all the same, nobody knows how
            member.handle.ended = True
        self._show(member.output.finish)
        if not member.why_lost:  # else that was told
            self._lose(member)
        for look in list(self._on_ends):
            look()

    def _lose(self, member: Member) -> None:
        """A rank has ended, or is of no use any more."""
        self._show(self._on_loss, member)
        if self._turn is not None and member in self._turn.members:
            self._turn.ended(member)

    def _cannot_read(self, member: Member, error: Exception) -> None:
        logger.warning("A message of rank %s cannot be read; it is killed.", member.rank, exc_info=error)
        said = " ".join(f"{type(error).__name__}: {error}".split())
        member.why_lost = f"what it sent to the notebook cannot be read ({said}), so it was killed"
        self._sources.drop(member.handle.channel)
        self._kill(member)
        self._lose(member)

    def _kill(self, member: Member) -> None:
        try:
            member.handle.signal(signal.SIGKILL)
        except Exception:
            logger.warning("Rank %s could not be killed.", member.rank, exc_info=True)

    def _emit(self, rank: int, stream: StreamName, text: str) -> None:
        if self._output is not None:
            self._output.text(rank, stream, text)

    def _on_display(self, member: Member) -> None:
        if not member.displays:
            self._receive(member)  # it was sent before its place was marked, so it is there
        if member.displays:
            display = member.displays.popleft()
            if self._output is not None:
                self._output.display(member.rank, display)

    def _read_rest(self, member: Member) -> None:
        """Everything a rank wrote before it answered, or ended."""
        handle = member.handle
        for fd, take in (
            (handle.stdout, functools.partial(self._show, member.output.feed)),
            (handle.stderr, functools.partial(self._take_stderr, member)),
            (handle.stacks, member.stacks.extend),
        ):
            while fd in self._sources and (data := self._read(fd)):
                take(data)
