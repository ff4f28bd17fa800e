"""The order in which blocks compute, and a thread that fetches the next one meanwhile.

::

    the model's thread    before(A)  A computes  after(A)  before(B)  B computes  after(B)
                          | arrive A             | leave A | waits for its fetch
                          | asks for B                     | asks for C
    thread of the schedule  fetch B ------------------|      fetch C ---------------|

Which block is next is learned from the two before it, and again whenever it was another one. A new block
is followed by the one that was added after it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.training.bigmodel.staging import Staging

if TYPE_CHECKING:
    import torch

    from nb_accelerate.training.bigmodel.placement import Placement

_IDLE = 0.1  # seconds without work after which the thread ends. To start it again takes a ten-thousandth.


class Schedule:
    """Let each block arrive before it computes and rest afterwards, and fetch the next one ahead.

    One for each model and device. Several threads may compute in the model. A copy, by `copy.deepcopy` or pickling, is
    a new schedule, which learns from the start; so is the one of a forked process.

    Args:
        device: of its blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.events: list[tuple[str, str]] | None = None
        """If it is a list, what happens: ``"arrive"``, ``"fetch"``, ``"leave"`` or ``"drop"``, and the block's name."""
        self._added: dict[Placement, Placement | None] = {}
        self._start()

    def _start(self) -> None:
        """Set what belongs to this process."""
        self._process = os.getpid()
        self._condition = threading.Condition()
        self._recent = _Recent()
        self._order: dict[tuple[Placement | None, Placement], Placement] = {}
        self._thread: HelperThread | None = None
        self._is_closing = False
        self._wanted: Placement | None = None  # asked for, not begun
        self._fetching: Placement | None = None  # by the thread, now
        self._ahead: Placement | None = None  # the last one that was asked for, until it arrives
        self._failure: tuple[Placement | None, BaseException] | None = None
        self.staging = Staging(self.device)
        for placement in self._added:
            placement.join(self.staging)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device,)

    def add(self, placement: Placement) -> None:
        """Add a block. Blocks are expected in the order of these calls until another order is seen."""
        if self._added:
            self._added[next(reversed(self._added))] = placement
        self._added[placement] = None
        placement.join(self.staging)

    def before(self, placement: Placement) -> None:
        """Let a block begin: its weights are on the device afterwards, and the next block is fetched meanwhile.

        If it raises, an interrupt too, `after` may be called or not.
        """
        if self._process != os.getpid():
            self._start()
        if placement not in self._added:
            self.add(placement)
        self._claim(placement)
        placement.arrive()
        self._tell("arrive", placement)
        following = self._learn(placement)
        if following is not None and following.is_wanted(used=following in self._recent.round):
            self._ask_for(following)

    def after(self, placement: Placement) -> None:
        """Let a block end. Called when it has raised, too."""
        placement.leave()
        self._tell("leave", placement)

    def close(self) -> None:
        """End the thread and let go of buffers. A block that begins afterwards starts them again."""
        if self._process != os.getpid():
            return
        with self._condition:
            self._wanted, self._is_closing, thread = None, True, self._thread
            self._condition.notify_all()
        if thread is not None:
            thread.join()
        self._is_closing = False
        self._drop_ahead()
        self.staging.clear()

    def _claim(self, placement: Placement) -> None:
        """Wait for the fetch of a block if it is under way, and drop what was fetched instead."""
        with self._condition:
            if self._wanted is placement:
                self._wanted = None  # what begins here needs no other thread
            # Its own fetch is faster than a second one, which would read the same pages beside it.
            while self._fetching is placement:
                self._condition.wait()
            failure, self._failure = self._failure, None
            ahead, self._ahead = self._ahead, None
        if ahead is not placement:
            self._drop(ahead)
        if failure is not None and failure[0] is placement:
            raise failure[1]

    def _drop_ahead(self) -> None:
        with self._condition:
            ahead, self._ahead = self._ahead, None
        self._drop(ahead)

    def _drop(self, ahead: Placement | None) -> None:
        if ahead is not None:
            ahead.drop()
            self._tell("drop", ahead)

    def _learn(self, placement: Placement) -> Placement | None:
        """Take note that a block has begun, and return the one that is expected next."""
        recent = self._recent
        if recent.last is not None:
            self._order[recent.before_last, recent.last] = placement
        recent.before_last, recent.last = recent.last, placement
        if placement in recent.round:
            recent.round.clear()
        recent.round.add(placement)
        return self._order.get((recent.before_last, placement)) or self._added[placement]

    def _ask_for(self, placement: Placement) -> None:
        with self._condition:
            if self._ahead is not None:  # another thread of the model was quicker
                return
            self._wanted = self._ahead = placement
            self._tell("fetch", placement)
            if self._thread is None:
                thread = HelperThread(self._fetch_what_is_wanted, name="weights", on_failure=self._keep_failure)
                thread.start()
                self._thread = thread
            self._condition.notify_all()

    def _tell(self, what: str, placement: Placement) -> None:
        if self.events is not None:
            self.events.append((what, placement.name))

    # --- in the thread

    def _fetch_what_is_wanted(self) -> None:
        while (placement := self._next()) is not None:
            placement.fetch()
            with self._condition:
                self._fetching = None
                # The model's thread may have taken another way meanwhile: then nobody comes for this block.
                is_late = self._ahead is not placement
                self._condition.notify_all()
            if is_late:
                placement.drop()
        if not self.staging.swaps:  # the model has ended, perhaps with another block than expected
            self._drop_ahead()

    def _next(self) -> Placement | None:
        """Wait for a block to fetch. None if none came for a while, or the schedule is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._wanted is not None or self._is_closing, _IDLE)
            self._fetching, self._wanted = self._wanted, None
            if self._fetching is None:
                # Under the lock: the next request finds either a thread that will look once more, or none.
                self._thread = None
            return self._fetching

    def _keep_failure(self, _thread: str, error: BaseException) -> None:
        """Keep what a fetch has raised until the block begins."""
        with self._condition:
            self._failure = self._fetching, error
            self._fetching = self._thread = None
            self._condition.notify_all()


class _Recent(threading.local):
    """What a thread has computed: the last two blocks, and all since one came again."""

    def __init__(self) -> None:
        self.before_last: Placement | None = None
        self.last: Placement | None = None
        self.round: set[Placement] = set()
