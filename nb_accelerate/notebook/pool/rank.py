"""A rank of a pool, which can be taken out of a collective."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.ranks.proxy import RankProxy

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from nb_accelerate.notebook.protocol.messages import CutOff
    from nb_accelerate.notebook.ranks.handle import RankHandle


class PoolRank(RankProxy):
    """Owns the handle of a rank that stays, and its alarm channel; see `RankProxy` for the rest.

    Attributes:
        steps: number of collectives that each of its process groups had seen at the end of its last cell, by group.
        has_joined: whether it has been in a process group, so that it may have variables.
        device: what it computes on, as text.
    """

    def __init__(self, handle: RankHandle) -> None:
        super().__init__(handle)
        self.steps: Mapping[str, int] = {}
        self.has_joined = False
        self.device = ""
        self._alarm, there = Channel.pair()
        self._alarm_end: socket.socket | None = there

    def take_alarm(self) -> socket.socket | None:
        """Return the rank's end of the alarm channel, to send to it and to close; None if it was taken before."""
        end, self._alarm_end = self._alarm_end, None
        return end

    def cut_off(self, message: CutOff) -> None:
        """Have the rank break off a collective, see `CutOff`."""
        with contextlib.suppress(OSError):  # it has just ended
            self._alarm.send(message)

    @override
    def close(self) -> None:
        self._alarm.close()
        if self._alarm_end is not None:
            self._alarm_end.close()
        super().close()
