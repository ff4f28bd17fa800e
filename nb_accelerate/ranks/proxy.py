"""One rank of a pool, as the kernel knows it."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, Any

from nb_accelerate.protocol.channel import Channel
from nb_accelerate.ranks.output import RankOutput

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from nb_accelerate.launch.local import RankHandle
    from nb_accelerate.protocol.messages import CutOff, Display
    from nb_accelerate.protocol.output import StreamName


class Member:
    """Owns a rank's handle and its alarm channel.

    Attributes:
        rank: its number.
        handle: its connections.
        output: takes what it prints.
        displays: what it has sent and its output has not come to yet.
        inbox: other messages that have come.
        stacks: what it answered when it was asked where it is.
        steps: collectives that each of its process groups has seen, as of its last cell.
        is_ready: it has been set up.
        is_leaving: it was asked to end, or is killed, on purpose.
        why_lost: why it is of no use any more, although its process may live; "" for one that is.
        device: what it computes on, as text.
    """

    def __init__(
        self,
        handle: RankHandle,
        emit: Callable[[int, StreamName, str], None],
        on_display: Callable[[Member], None],
    ) -> None:
        self.rank = handle.rank
        self.handle = handle
        self.output = RankOutput(
            handle.mark,
            lambda stream, text: emit(self.rank, stream, text),
            alone=False,
            on_display=lambda: on_display(self),
        )
        self.displays: deque[Display] = deque()
        self.inbox: deque[tuple[Any, tuple[int, ...]]] = deque()
        self.stacks = bytearray()
        self.steps: Mapping[str, int] = {}
        self.is_ready = False
        self.is_leaving = False
        self.why_lost = ""
        self.device = ""
        self._alarm, there = Channel.pair()
        self._alarm_end: socket.socket | None = there

    @property
    def is_gone(self) -> bool:
        """It has ended, or is of no use any more."""
        return self.handle.ended or bool(self.why_lost)

    @property
    def is_new(self) -> bool:
        """It has not got its end of the alarm channel yet."""
        return self._alarm_end is not None

    def take_alarm(self) -> socket.socket | None:
        """The rank's end of the alarm channel, to send to it and to close."""
        end, self._alarm_end = self._alarm_end, None
        return end

    def cut_off(self, message: CutOff) -> None:
        """Take it out of a collective."""
        with contextlib.suppress(OSError):  # it has just ended
            self._alarm.send(message)

    def close(self) -> None:
        """Let go of it."""
        for _, fds in self.inbox:
            for fd in fds:
                os.close(fd)
        self.inbox.clear()
        self._alarm.close()
        if self._alarm_end is not None:
            self._alarm_end.close()
        self.handle.close()
