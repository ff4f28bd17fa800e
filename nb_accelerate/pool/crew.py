"""The ranks of a pool, and the one thread that listens to them.

::

    channel  --> Ready, Display, Ask ... --+
    stdout, stderr --> the cell's output   |
    stacks   --> where a rank is           +--> one selector, in one thread --> the turn that is on
    status   --> a rank has ended          |
    wake     --> what other threads ask ---+
    deadlines -----------------------------+

Everything below the public methods runs in that thread, so nothing here needs a lock but the queue of requests.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from nb_accelerate.launch.sources import Sources
from nb_accelerate.pool.display_ids import DisplayIds
from nb_accelerate.pool.hang import HangWatch
from nb_accelerate.pool.member import Member
from nb_accelerate.pool.panel import outcome
from nb_accelerate.pool.questions import Question
from nb_accelerate.protocol.messages import Ask, Display, GoesOn, Parcel, Ready, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.display import Panel
    from nb_accelerate.launch.handle import RankHandle
    from nb_accelerate.pool.output import CellOutput
    from nb_accelerate.pool.turn import Turn
    from nb_accelerate.protocol.output import StreamName

_RUSH = 0.0003
"""Seconds between two lots of output that follow one another at once."""

_LUMP = 1 << 13
"""Bytes that are worth waking up for."""

_NEVER = float("inf")


class Crew:
    """Ranks that were started, and the thread that owns them. `close` it.

    Args:
        on_loss: called, in the thread, when a rank has ended.

    Attributes:
        members: by rank.
        ids: of displays.
    """

    def __init__(self, on_loss: Callable[[Member], None]) -> None:
        self.members: dict[int, Member] = {}
        self.ids = DisplayIds()
        self.failure: BaseException | None = None
        self._on_loss = on_loss
        self._turn: Turn | None = None
        self._hang: HangWatch | None = None
        self._panel: Panel | None = None
        self._output: CellOutput | None = None
        self._on_ends: list[Callable[[], None]] = []
        self._requests: deque[Callable[[], None]] = deque()
        self._ending = False
        self._printed = False
        self._last_printed = 0.0
        self._sources = Sources(self._on_bell)
        self._thread = threading.Thread(target=self._run, name="nb_accelerate-pool", daemon=True)
        self._thread.start()

    # For other threads.

    def add(self, handle: RankHandle) -> Member:
        """Watch over a rank that was started; it takes the place of one that has ended."""
        member = Member(handle, self._emit, self._on_display)
        self._do(lambda: self._add(member))
        return member

    def remove(self, member: Member) -> None:
        """Forget a rank that has ended."""
        self._do(lambda: self._remove(member))

    def begin(
        self,
        turn: Turn,
        output: CellOutput | None = None,
        *,
        watch_for_hangs: bool = False,
        panel: Panel | None = None,
    ) -> None:
        """Ask ranks to do something. One turn at a time: the one before is done.

        Args:
            turn: what to ask.
            output: where their output goes from now on, also after the turn.
            watch_for_hangs: say who waits for whom when nothing moves.
            panel: shows how far the ranks are.
        """
        self._post(lambda: self._begin(turn, output, panel, watch_for_hangs=watch_for_hangs))

    def interrupt(self, turn: Turn) -> None:
        """End a turn early. Any thread, also a signal handler."""
        self._post(lambda: self._interrupt(turn))

    def say(self, line: str) -> None:
        """Tell the user something, where the last output went. In the thread itself too."""
        self._post(lambda: self._output.say(line) if self._output else None)

    def wait_for_end(self, members: list[Member], seconds: float) -> bool:
        """Wait until these ranks have ended, at most so long."""
        ended = threading.Event()

        def look() -> None:
            if all(member.handle.ended for member in members):
                ended.set()

        self._post(lambda: self._on_ends.append(look))
        self._post(look)
        try:
            return ended.wait(seconds)
        finally:
            self._post(lambda: self._on_ends.remove(look))

    def close(self) -> None:
        """End the thread and let go of every rank; those that live see the end of their channels."""
        self._ending = True
        self._post(lambda: None)
        self._thread.join()
        if self._output is not None:
            self._output.close()
        for member in self.members.values():
            member.close()
        self._sources.close()

    def _post(self, action: Callable[[], None]) -> None:
        self._requests.append(action)
        self._sources.ring(b"!")

    def _do(self, action: Callable[[], object]) -> None:
        """Run something in the thread, and wait until it is done."""
        done = threading.Event()

        def run() -> None:
            action()
            done.set()

        self._post(run)
        while not done.wait(1.0):
            if not self._thread.is_alive():
                raise self.failure or RuntimeError("the thread of the pool has ended")

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self._act_on_deadlines()
                self._sources.wait(self._next_deadline() - time.monotonic())
                self._see_whether_turn_is_done()
                self._let_output_gather()
        except BaseException as error:
            # A mistake of ours. Whoever waits must not wait for ever.
            self.failure = error
            if self._turn is not None:
                self._turn.finish()
            raise

    def _let_output_gather(self) -> None:
        """Where ranks print without end, read in lumps: waking up for every line takes time from the ranks."""
        now = time.monotonic()
        if self._printed and now - self._last_printed < _RUSH:
            time.sleep(_RUSH)
        if self._printed:
            self._last_printed, self._printed = now, False

    def _on_bell(self, _: bytes) -> None:
        while self._requests:
            self._requests.popleft()()

    def _add(self, member: Member) -> None:
        self.members[member.rank] = member
        for source, action in (
            (member.handle.channel, self._on_channel),
            (member.handle.stdout, self._on_stdout),
            (member.handle.stderr, self._on_stderr),
            (member.handle.stacks, self._on_stacks),
            (member.handle.status, self._on_status),
        ):
            self._sources.add(source, functools.partial(action, member))

    def _remove(self, member: Member) -> None:
        handle = member.handle
        for source in (handle.channel, handle.stdout, handle.stderr, handle.stacks, handle.status):
            self._sources.drop(source)
        if self.members.get(member.rank) is member:
            del self.members[member.rank]
        member.close()

    def _begin(self, turn: Turn, output: CellOutput | None, panel: Panel | None, *, watch_for_hangs: bool) -> None:
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
            member.output.finish()
        for callback in turn.callbacks:
            callback()
        if self._output is not None:
            self._output.finish()
        if self._panel is not None:
            self._panel.finish(*outcome(turn))
        self._turn = self._hang = self._panel = None
        turn.finish()

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
            self._hang.act()
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
        messages, is_open = member.handle.channel.drain()
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
        data = self._sources.read(member.handle.stdout)
        member.output.feed(data)
        self._printed = self._printed or len(data) < _LUMP
        self._moved(member)
        self._handle_answers(member)

    def _on_stderr(self, member: Member) -> None:
        data = self._sources.read(member.handle.stderr)
        # Once connections were broken, C++ code complains about that at length.
        if self._turn is None or not self._turn.was_cut:
            member.output.feed_stderr(data)
        self._moved(member)

    def _moved(self, member: Member) -> None:
        if self._hang is not None:
            self._hang.moved()
        if self._output is not None:
            self._output.redrawing(member.rank, member.output.unfinished("stderr"))
            self._output.redrawing(member.rank, member.output.unfinished("stdout"))

    def _on_stacks(self, member: Member) -> None:
        member.stacks += self._sources.read(member.handle.stacks)

    def _on_status(self, member: Member) -> None:
        self._on_channel(member)
        self._read_rest(member)
        self._sources.drop(member.handle.status)
        member.handle.read_status()
        member.output.finish()
        self._on_loss(member)
        for look in list(self._on_ends):
            look()
        if self._turn is not None and member in self._turn.members:
            self._turn.ended(member)

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
            (handle.stdout, member.output.feed),
            (handle.stderr, member.output.feed_stderr),
            (handle.stacks, member.stacks.extend),
        ):
            while fd in self._sources:
                data = self._sources.read(fd)
                if not data:
                    break
                if fd != handle.stderr or self._turn is None or not self._turn.was_cut:
                    take(data)
