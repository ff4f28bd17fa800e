"""The loop that waits for everything that can happen to ranks.

::

    what ranks send (`RankReader`) ----------------+
    what other threads post (`PostedActions`) -----+--> one selector, in one thread --> requests --> done
    deadlines -------------------------------------+

A launch runs it in the calling thread until its request is done (`RankLoop.run`); a pool, and a launch in which the
user is asked for input, in a thread of its own (`RankLoop.start`). All but the methods at the top of the class runs in
that thread, so only the queue of posted actions has a lock. If the thread of a pool fails, it kills the ranks, and
every waiting thread gets an error at once.

The class is long because all of it acts, in that one thread, on the same ranks and requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.display.widgets.shell_channel import read_shell_channel
from nb_accelerate.notebook.protocol.messages import DebuggerResumed, InputRequest, Ready
from nb_accelerate.notebook.ranks.failing.errors import outcome_of
from nb_accelerate.notebook.ranks.failing.hang import HangWatch
from nb_accelerate.notebook.ranks.failing.incidents import oom_kills
from nb_accelerate.notebook.ranks.input_requests import PendingInput
from nb_accelerate.notebook.ranks.output.guard import short_text
from nb_accelerate.notebook.ranks.reader import Incoming, RankReader, close_fds, kill
from nb_accelerate.notebook.ranks.request import Awaits
from nb_accelerate.notebook.ranks.sources import Sources
from nb_accelerate.notebook.ranks.steps import StepKind
from nb_accelerate.notebook.ranks.timeouts import NEVER
from nb_accelerate.notebook.ranks.waiting import ask_user, interrupts_call, wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request


class PostedActions:
    """A queue of actions. Any thread posts, also in a signal handler; the loop's thread runs them in their order.

    Args:
        wake: wakes up the loop's thread, which then calls `run`.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self.ended = threading.Event()  # set when actions that are posted will be refused
        self._wake = wake
        # Its methods are atomic. A lock could be held by the very code that a signal handler, which posts, has
        # interrupted.
        self._actions: deque[tuple[Callable[[], object], Callable[[], object]]] = deque()

    def post(self, action: Callable[[], object], refuse: Callable[[], object] = lambda: None) -> None:
        """Have the loop's thread call `action`; if that thread has ended, `refuse` is called instead, in any thread."""
        self._actions.append((action, refuse))
        self._wake()
        if self.ended.is_set():  # perhaps just now: then `end` refuses it, or this does, as each is popped once
            self._refuse()

    def do(self, action: Callable[[], object], why_not: Callable[[], Exception]) -> None:
        """Have the loop's thread call `action`, and wait for it. Raises what it raises; `why_not()` if refused."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.post(run, lambda: done.set_exception(why_not()))
        done.result()

    def run(self) -> None:
        """Run the actions that were posted. For the loop's thread."""
        while self._actions:
            posted = self._actions.popleft()
            try:
                posted[0]()
            except BaseException:
                self._actions.appendleft(posted)  # it is refused when the thread ends, which ends the wait for it
                raise

    def end(self) -> None:
        """Refuse all actions in the queue, and all later ones."""
        self.ended.set()
        self._refuse()

    def _refuse(self) -> None:
        while True:
            try:
                _, refuse = self._actions.popleft()
            except IndexError:
                return
            refuse()


logger = logging.getLogger(__name__)

# Seconds for which the count of the out-of-memory killer's victims is reused. Reading it again for each of many short
# cells would take a tenth of their time.
_OOM_KILLS_MAX_AGE = 1.0

# Seconds between two looks for ranks whose end nobody will report, while ranks are being ended.
_INTERVAL_WHILE_ENDING = 0.1

_JOIN_TIMEOUT = 5.0  # seconds in which `close` waits for the thread to end


class RankLoop(RankReader):
    """Waits for ranks that were added, and carries requests to them. `close` it.

    Args:
        monitor: called all ``monitor_interval`` seconds, and while ranks are being ended.
        on_rank_end: called, in the thread, when a rank has ended.

    Attributes:
        requests: begun and not done.
        observers: called in the thread after each event, before deadlines are checked: for tests, and for code that
            acts when something has happened and not at a time.
    """

    observers: ClassVar[list[Callable[[RankLoop], object]]] = []

    def __init__(
        self,
        *,
        monitor_interval: float = NEVER,
        monitor: Callable[[], object] = lambda: None,
        on_rank_end: Callable[[RankProxy], object] = lambda _: None,
    ) -> None:
        super().__init__()
        self._sources = Sources(lambda: self.posted.run())  # noqa: PLW0108 - `posted` is made below
        self.ranks: dict[int, RankProxy] = {}
        self.requests: list[Request] = []
        self.failure: BaseException | None = None
        self._monitor_interval, self._monitor = monitor_interval, monitor
        self._check_at = time.monotonic() + monitor_interval
        self._on_rank_end = on_rank_end
        self._hangs: dict[Request, HangWatch] = {}
        self._ending = False
        self._is_closed = False
        self._oom_kills = 0
        self._oom_kills_read_at = -NEVER
        self._thread: HelperThread | None = None
        self.posted = PostedActions(self._sources.ring)
        self.post = self.posted.post

    # For other threads.

    def start(self) -> None:
        """Run in a thread of its own, until `close`."""
        self._thread = HelperThread(self._run, name="ranks")
        self._thread.start()

    def run(self, request: Request) -> None:
        """Run until a request, which was begun, is done: in the calling thread, until that has to ask the user."""
        while self._thread is None and not request.done.is_set():
            self.wait_once()
            if request.input_requests.is_asked:
                self.start()
        if self._thread is not None:
            self.wait_for(request)

    def wait_for(self, request: Request) -> None:
        """Wait until a request is done, beside the thread. Interrupts are passed on; debuggers may ask for input."""
        if not request.done.is_set():
            with interrupts_call(lambda: self.interrupt(request)):
                self.attend(request)

    def attend(self, request: Request) -> None:
        """Do what `wait_for` does, inside a block of the caller's that passes interrupts on."""
        while (asked := request.input_requests.get(read_shell_channel)) is not None:
            try:
                asked.answer(ask_user(asked.prompt))
            except KeyboardInterrupt:
                request.input_requests.close()  # before another rank, which asks too, gets its prompt
                self.interrupt(request)
            except NotImplementedError:  # IPython's StdinNotImplementedError is one
                self.say(f"rank {asked.rank.rank} asks for input, but this front end allows none")
                asked.answer(None)
        wait(request.done)

    def add(self, rank: RankProxy) -> None:
        """Read a rank that was started; it replaces one with the same number. It is the loop's, also if this fails."""
        try:
            self._do(lambda: self._add(rank))
        except BaseException:  # also one that broke off the wait for it
            self.post(lambda: self._remove(rank), lambda: self._close_rank(rank))
            raise

    def remove(self, rank: RankProxy) -> None:
        """Close a rank that has ended, and forget it."""
        self._do(lambda: self._remove(rank))

    def begin(self, request: Request) -> None:
        """Begin a request: in the thread, or at once if there is none and the caller will `run` it.

        If the thread has ended, the request is done at once, with a failure.
        """
        if self._thread is None:
            self._begin(request)
        else:
            self.post(lambda: self._begin(request), lambda: request.fail(self.why_it_ended))

    def interrupt(self, *requests: Request, kind: StepKind = StepKind.INTERRUPT, how: str = "interrupted") -> None:
        """End the first of these requests that is not done. For any thread, also in a signal handler."""
        self.post(lambda: self._interrupt(requests, kind, how))

    def say(self, line: str) -> None:
        """Show a line of this package's own where the last output went. For any thread."""
        self.post(lambda: self.output.say(line) if self.output else None)

    def close(self) -> None:
        """End the thread, kill the ranks that live, and close all descriptors. Can be repeated."""
        self._ending = True
        if self._thread is not None:
            # It sees that it is to end when it wakes up, for which anything will do.
            self.post(lambda: None)
            self._thread.join(_JOIN_TIMEOUT)
            if self._thread.is_alive():
                # It still uses the descriptors, so they cannot be closed. It ends by itself as soon as it can.
                logger.warning("The thread that listens to the ranks has not ended within %g s.", _JOIN_TIMEOUT)
                return
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self.ranks.values():
            kill(rank)
        while self.ranks:
            self.ranks.popitem()[1].close()
        self._sources.close()

    @property
    def why_it_ended(self) -> PoolError:
        """The error for requests after its end."""
        if self.failure is None:
            return PoolError("the ranks were stopped")
        error = PoolError(
            f"the thread that listens to the ranks has failed ({type(self.failure).__name__}: {self.failure}), so they "
            f"were ended, and their variables are lost. To start new ones: %distributed start"
        )
        error.__cause__ = self.failure
        return error

    def _do(self, action: Callable[[], object]) -> None:
        """Run an action in the thread, and wait for it. Raises PoolError if the thread has ended."""
        if self._thread is None:
            action()
        else:
            self.posted.do(action, lambda: self.why_it_ended)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._ending:
                self.wait_once()
        except BaseException as error:
            logger.exception("The thread that listens to the ranks has failed; they are ended.")
            self.failure = error
            for rank in list(self.ranks.values()):
                kill(rank)
        finally:
            # Threads that wait for a request, or for an action, would wait for ever otherwise.
            for request in self.requests:
                request.fail(self.why_it_ended)
            self.posted.end()

    def wait_once(self) -> None:
        """Wait for one event or deadline, and handle it. It may end the loop, or the request that it runs for."""
        if any(request.is_being_ended for request in self.requests):
            self._check_at = min(self._check_at, time.monotonic() + _INTERVAL_WHILE_ENDING)
        until_read = read_shell_channel()
        seconds = self._next_deadline() - time.monotonic()
        self._sources.wait(min(seconds, until_read))
        for request in [request for request in self.requests if not any(map(request.waits_for, request.ranks))]:
            self._finish(request)
        if seconds <= 0:  # what had come by then has been read, so that it is not late
            self._act_on_deadlines()
        for observer in self.observers:
            observer(self)
        self._sources.space_small_reads()

    def _add(self, rank: RankProxy) -> None:
        self.ranks[rank.rank] = rank  # before its end, which may have come already
        rank.handle.connect(self._sources, Incoming(rank, self))

    def _remove(self, rank: RankProxy) -> None:
        rank.handle.disconnect()
        self._close_rank(rank)

    def _close_rank(self, rank: RankProxy) -> None:
        if self.ranks.get(rank.rank) is rank:
            del self.ranks[rank.rank]
        rank.close()

    # Requests.

    def _begin(self, request: Request) -> None:
        if request.output is not None and request.output is not self.output:
            if self.output is not None:
                self.output.close()
            self.output = request.output
            for rank in request.ranks:
                rank.output.forget()
        for rank in request.ranks:
            rank.output.alone = self.output is not None and self.output.alone
        self.requests.append(request)
        now = time.monotonic()
        if now - self._oom_kills_read_at > _OOM_KILLS_MAX_AGE:
            self._oom_kills, self._oom_kills_read_at = oom_kills(), now
        request.oom_kills_before = self._oom_kills
        request.begin()
        if request.hangs is not None:
            self._hangs[request] = HangWatch(request, request.hangs)

    def _interrupt(self, requests: tuple[Request, ...], kind: StepKind, how: str) -> None:
        for request in requests:
            if request in self.requests:
                request.interrupt(kind, how)
                return
            if not request.done.is_set():
                request.is_unwanted = True
                return

    def _finish(self, request: Request) -> None:
        """End a request whose ranks have all answered or ended."""
        for rank in request.ranks:
            self.show(rank.output.finish)
        for callback in request.callbacks:
            self._attempt(f"what follows {request.wording.what}", callback)
        if self.output is not None:
            self.output.finish()
        panel = request.panel
        if panel is not None and not request.keeps_panel:
            self.show(lambda: panel.finish(*outcome_of(request)))
        self._hangs.pop(request, None)
        request.on_end()
        self.requests.remove(request)  # only now: if `on_end` fails, so does the request
        request.finish()

    # Deadlines.

    def _next_deadline(self) -> float:
        due = min(self._check_at, self.output.due if self.output else NEVER)
        for request in self.requests:
            due = min(due, request.due, request.panel.due if request.panel else NEVER)
        for hang in self._hangs.values():
            due = min(due, hang.due)
        for rank in self.ranks.values():
            due = min(due, rank.stacks_due)
        return due

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        for rank in self.ranks.values():
            if rank.stacks_due <= now:
                rank.ask_by_signal()
        for request in self.requests:
            if request.due <= now:
                request.act()
        for request, hang in list(self._hangs.items()):
            if hang.due <= now:
                self._attempt("the watch for ranks that hang", hang.act)
                if hang.due <= now:  # it has failed, and would do so again at once
                    del self._hangs[request]
        if self.output is not None and self.output.due <= now:
            self.output.flush()
        for request in self.requests:
            if request.panel is not None and request.panel.due <= now:
                request.panel.refresh()
        if self._check_at <= now:
            self._check_at = now + self._monitor_interval
            self._monitor()
            for rank in [rank for rank in self.ranks.values() if not rank.is_gone and rank.handle.is_lost()]:
                rank.handle.give_up()
                self.on_end(rank)

    def _attempt(self, what: str, action: Callable[..., object], *arguments: Any) -> None:
        """Call what the ranks can do without: an error in it is told and logged, and the loop goes on."""
        try:
            action(*arguments)
        except Exception as error:
            line = f"{what} failed ({short_text(error)}). The ranks go on"
            logger.log(logging.WARNING if self.output is None else logging.INFO, "%s", line, exc_info=error)
            if self.output is not None:
                self.output.say(line)

    # Called by the reader.

    @override
    def on_message(self, rank: RankProxy, message: Any, fds: tuple[int, ...]) -> None:
        asked = (request for request in self.requests if request.awaits is not Awaits.END and rank in request.ranks)
        request = next((request for request in asked if request.waits_for(rank)), None)
        if isinstance(message, Ready):
            rank.is_ready = True
            rank.handle.note_pid(message.pid)
            if request is not None:
                request.ready(rank)
        elif isinstance(message, InputRequest):
            self._on_input_request(PendingInput(rank, message), request)
        elif isinstance(message, DebuggerResumed):
            if request is not None:
                request.input_requests.goes_on(rank.rank)
        elif request is not None:
            request.answered(rank, message, fds)
        else:  # the answer to a request that was given up
            close_fds(fds)

    def _on_input_request(self, pending: PendingInput, request: Request | None) -> None:
        if self.output is not None:
            self.output.finish()  # what was printed before is to be seen first
        is_ending = request is not None and request.step is not None
        if request is not None and request.attended and not is_ending:
            request.input_requests.put(pending)
            return
        if self.output is not None and not is_ending:
            self.output.say(f"rank {pending.rank.rank} asks for input, which it cannot have in the background")
        pending.answer(None)

    @override
    def on_output(self, rank: RankProxy) -> None:
        for hang in self._hangs.values():
            hang.printed()

    @override
    def drops_stderr(self) -> bool:
        return any(StepKind.CUT in request.steps_taken for request in self.requests)

    @override
    def on_end(self, rank: RankProxy) -> None:
        rank.stacks_due = NEVER
        rank.has_stacks.set()
        self._attempt(f"what follows the end of rank {rank.rank}", self._on_rank_end, rank)
        for request in self.requests:
            if rank in request.ranks:
                request.ended(rank)
