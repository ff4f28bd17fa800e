"""The ranks of a start on several machines: what happens to those of one matters to the others.

::

    a rank here fails --> key of the round --> the request of the others is abandoned, with the reason
    ranks here have lost others            --> the launch that does not answer is named

A thread asks the store, and the loop acts. A machine that is silent is only told: its ranks may be well.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.launch.elastic import ElasticRendezvous
    from nb_accelerate.notebook.launch.machines import Machine
    from nb_accelerate.notebook.ranks.request import Request

_CHECK_INTERVAL = 0.5
"""Seconds between two checks of the store."""

_ANSWER_LIMIT = 2.0
"""Seconds for another launch to answer, which it does at its next check."""

_REASON_LIMIT = 5.0
"""Seconds for another machine to say why its ranks have gone, when those of this one have lost them."""

_CLOSING_LIMIT = 2.0
"""Seconds for the thread to end: one that waits for a machine without network goes on for longer."""


class MachineWatch:
    """Watches the other machines during one start. `close` it."""

    def __init__(self, elastic: ElasticRendezvous, request: Request, say: Callable[[str], object]) -> None:
        self._elastic = elastic
        self._request = request
        self._say = say
        self._news: Exception | None = None
        self._unreachable: Exception | None = None
        self._silent: list[Machine] = []
        self._told: list[str] = []
        self._checked_at = time.monotonic()
        self._asked: float | None = None
        self._is_over = False
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = HelperThread(self._run, name="machines", on_failure=self._failed)
        self._thread.start()

    def check(self) -> None:
        """Tell the others of a failure here, or abandon the request because of one there; in the loop's thread."""
        if self._is_over or self._request.done.is_set():
            return
        if self._has_own_cause():
            self._tell()
        elif self._news is not None:
            self._is_over = True
            self._request.abandon(self._news)
        else:
            self._tell_silence()

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return why the request has failed: the reason of another machine if ranks here only know that they lost it.

        If the reason is here, the others are told. `error` is what the ranks here say; None if they have not failed.
        """
        if self._has_own_cause():
            self._tell()
        elif error is not None and self._request.incidents and not self._is_over:
            self._asked = time.monotonic()
            self._wake.set()
            while self._thread.is_alive() and self._news is None and time.monotonic() < self._asked + _REASON_LIMIT:
                self._thread.join(0.05)
            return self._news or self._unreachable or error
        return error

    def close(self) -> None:
        """Check no more. What the others are to be told is told."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_CLOSING_LIMIT)

    def _has_own_cause(self) -> bool:
        return not all(incident.peer_lost for incident in self._request.incidents)

    def _tell(self) -> None:
        """Tell the others why ranks here have failed, unless the user has interrupted, which the end tells."""
        if not self._is_over:
            self._is_over = True
            cause = first_cause(self._request.incidents)
            if cause.kind is not IncidentKind.INTERRUPTED:
                self._elastic.fail(said_of(cause, self._request))
                self._wake.set()

    def _tell_silence(self) -> None:
        limit = self._elastic.silence_limit
        silent = [str(machine) for machine in self._silent]
        if self._unreachable is None and time.monotonic() > self._checked_at + limit:
            silent.append(self._elastic.where)
        for machine in silent:
            if machine not in self._told:
                self._told.append(machine)
                self._say(
                    f"nothing was heard of the machine at {machine} for {limit:g} s: it is down or without network, or "
                    f"its launch is stopped. The ranks of this one go on until they need it"
                )

    # The thread.

    def _run(self) -> None:
        asked = None
        while True:
            is_last = self._is_closed  # before the check, which tells what was to be told
            self._news = self._news or self._elastic.news()
            self._silent = self._elastic.silent()
            if self._asked is not None and self._elastic.round is not None:
                if asked is None:
                    asked = time.monotonic()
                    self._elastic.round.ask_who_is_here()
                elif time.monotonic() > asked + _ANSWER_LIMIT:
                    self._news = self._news or self._elastic.lost()
            self._checked_at = time.monotonic()
            if is_last:
                return
            self._wake.wait(_CHECK_INTERVAL)
            self._wake.clear()

    def _failed(self, _: str, error: BaseException) -> None:
        """Keep why nothing is heard any more. Ranks that do not need the first machine go on."""
        if not self._is_closed:  # or it has waited for a machine without network until now
            self._unreachable = self._elastic.unreachable(error)
