"""The ranks of a start on several machines: what happens to those of one matters to the others.

::

    a rank here fails --> Machines --> the request of the others is abandoned, with the reason
    ranks here        --> rows     --> the panel of the first machine
"""

from __future__ import annotations

import base64
import contextlib
import time
import zlib
from typing import TYPE_CHECKING, Any

import psutil
from typing_extensions import override

from nb_accelerate.display.seen import Seen
from nb_accelerate.errors import MachineError
from nb_accelerate.progress_page import layout
from nb_accelerate.progress_page.sample import read
from nb_accelerate.ranks.failures import IncidentKind, first_cause, said_of
from nb_accelerate.ranks.panel import RequestView
from nb_accelerate.ranks.status import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.display.panel import Action
    from nb_accelerate.launch.machines import Machines
    from nb_accelerate.ranks.request import Request

_REASON_LIMIT = 5.0
"""Seconds for another machine to say why its ranks have gone, when those of this one have lost them."""


class MachineJoinedError(Exception):
    """The ranks were ended because another machine takes part from now on; no failure."""


class MachineWatch:
    """Watches the other machines during one start. `close` it.

    Args:
        machines: of the launch.
        round_id: of the rendezvous that the ranks have gone through.
        request: to the ranks of this machine.
    """

    def __init__(self, machines: Machines, round_id: str, request: Request) -> None:
        self._machines = machines
        self._round_id = round_id
        self._request = request
        self._is_over = False
        self._processes: dict[int, psutil.Process] = {}
        machines.tell_rows(self._rows)

    def look(self) -> None:
        """Tell the others of a failure here, or abandon the request because of one there; in the loop's thread."""
        if self._is_over or self._request.done.is_set():
            return
        if self._has_own_cause():
            self._tell()
        elif trouble := self._machines.trouble(self._round_id):
            self._abandon(trouble)
        elif self._machines.wants_regrouping(self._round_id):
            self._abandon(MachineJoinedError("another machine has come"))

    def explain(self, error: BaseException | None) -> BaseException | None:
        """Return why the request has failed: the reason of another machine if ranks here only know that they lost it.

        If the reason is here, the others are told.

        Args:
            error: what the ranks of this machine say; None if they have not failed.
        """
        if self._has_own_cause():
            self._tell()
        elif error is not None and self._request.incidents:
            deadline = time.monotonic() + _REASON_LIMIT
            self._machines.wait_for(lambda: self._machines.trouble(self._round_id) is not None, deadline)
            return self._machines.trouble(self._round_id) or error
        return error

    def close(self) -> None:
        """Tell nothing of these ranks any more: their pages may be closed after this."""
        self._machines.tell_rows(None)

    def _has_own_cause(self) -> bool:
        return not all(one.peer_lost for one in self._request.incidents)

    def _tell(self) -> None:
        """Tell the others why ranks here have failed, unless the user has interrupted, which the end tells."""
        if not self._is_over:
            self._is_over = True
            cause = first_cause(self._request.incidents)
            if cause.kind is not IncidentKind.INTERRUPTED:
                self._machines.fail(said_of(cause, self._request))

    def _abandon(self, error: Exception) -> None:
        self._is_over = True
        if isinstance(error, MachineError):
            self._machines.fail(str(error))  # a third machine may reach this one and not that one
        self._request.abandon(error)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "rank": one.rank,
                "state": state_of(one, self._request),
                "page": base64.b85encode(zlib.compress(one.handle.page.copy(), 1)).decode(),
                **self._process(one.handle.pid),
            }
            for one in self._request.ranks
        ]

    def _process(self, pid: int | None) -> dict[str, float]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            if pid is not None:
                process = self._processes.setdefault(pid, psutil.Process(pid))
                return {"memory": process.memory_info().rss, "cpu": process.cpu_percent()}
        return {}


class MachinesView(RequestView):
    """What the panel of the first machine watches: its own ranks, and what the others say of theirs.

    Args:
        request: to the ranks of this machine.
        actions: what the user can do.
        machines: of the launch.
    """

    def __init__(self, request: Request, actions: Sequence[Action], machines: Machines) -> None:
        super().__init__(request, actions)
        self._machines = machines
        self._own = {rank.rank for rank in request.ranks}

    @override
    def look(self) -> list[Seen]:
        elsewhere = {row["rank"]: row for row in self._machines.rows_of_others()}
        return [*super().look(), *(_seen(row) for rank, row in elsewhere.items() if rank not in self._own)]

    @override
    def log(self, rank: int) -> str:
        return super().log(rank) if rank in self._own else "What this rank prints is shown on its own machine."


def _seen(row: dict[str, Any]) -> Seen:
    memory = zlib.decompress(base64.b85decode(row["page"]), bufsize=layout.SIZE)
    return Seen(
        rank=int(row["rank"]),
        sample=read(memory[: layout.SIZE]),
        state=str(row["state"]),
        memory=int(row.get("memory", 0)),
        cpu=row.get("cpu"),
    )
