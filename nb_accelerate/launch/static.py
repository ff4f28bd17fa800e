"""The rendezvous of machines that are numbered by hand, over all starts of one launch.

The first machine listens at the one port that all were given: while machines come it answers them itself, and when all
are there its first rank has the socket, for the store of the ranks. Before each further start the port is the
launcher's again, so that a machine that was started anew can take its place.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError, StartError
from nb_accelerate.launch.machine_state import JOIN_TIMEOUT, machines_of, no_first_machine, not_all_came
from nb_accelerate.launch.machines import Machines

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.machine_state import Machine

_PORT_LIMIT = 5.0
"""Seconds for the last ranks, and processes that they have started, to leave the port."""

_RETRY_INTERVAL = 0.1
"""Seconds between two attempts to listen at it."""


class StaticRendezvous:
    """Machines with numbers that find one another, again and again. Close its `machines`.

    Args:
        options: of the launch.
        place: address and port of the first machine.
        own: address of this machine.
        listen: returns a socket that listens at an address and port, or raises ConfigError.
        num_processes: ranks on this machine.

    Attributes:
        machines: those of the launch.

    Raises:
        StartError: the first machine does not answer.
        ConfigError: the port is taken, or the first machine was started with another launch in mind.
    """

    def __init__(
        self,
        options: LaunchOptions,
        place: tuple[str, int],
        own: str,
        listen: Callable[[str, int], socket.socket],
        *,
        num_processes: int,
    ) -> None:
        self._place, self._listen = place, listen
        self._where = f"{place[0]}:{place[1]}"
        self._seconds = float((options.rdzv_conf or {}).get("join_timeout", JOIN_TIMEOUT))
        self._num_nodes = options.num_nodes
        self._number = 0
        self._round_id = ""
        node_rank, num_nodes = options.node_rank, machines_of(options)
        if node_rank == 0:
            self.machines = Machines.serve(
                listen(*place), place[0], num_processes=num_processes, num_nodes=num_nodes, node_rank=node_rank
            )
            return
        deadline = time.monotonic() + self._seconds
        try:
            self.machines = Machines.connect(
                place, own, deadline, num_processes=num_processes, num_nodes=num_nodes, node_rank=node_rank
            )
        except OSError as error:
            raise no_first_machine(self._where, self._seconds, error) from None

    @contextlib.contextmanager
    def next_round(self) -> Iterator[tuple[str, socket.socket | None]]:
        """Wait for the machines; gives a name of this round, and on the first machine the socket for the store.

        Raises:
            StartError: not all machines came, or one of them takes part no more.
            ConfigError: another program listens at the port by now.
        """
        machines = self.machines
        if machines.is_first and not machines.admits:
            machines.admit(self._listen_again())
        machines.wait_for_round()
        machines.wait_for(lambda: self._gone() is not None or self._is_complete(), time.monotonic() + self._seconds)
        if (gone := self._gone()) is not None:
            raise StartError(f"the launch on the machine at {gone} {gone.lost or gone.ended}: ranks cannot start here")
        if not self._is_complete():
            raise not_all_came(machines.all, self._num_nodes, self._where, self._seconds, machines.refused)
        with contextlib.ExitStack() as stack:
            listener = None
            if machines.is_first:
                listener = stack.enter_context(machines.admit_no_more())
                self._round_id = f"{self._where} {self._number}"
            else:
                self._round_id = machines.all[0].round_id
            self._number += 1
            machines.join(self._round_id)
            yield self._round_id, listener

    def _is_complete(self) -> bool:
        """Return whether all wait on the first machine; on others, whether that one has said so."""
        first, here = self.machines.all[0], self.machines.here
        if self.machines.is_first:
            return len(here) == self._num_nodes and all(one.is_waiting for one in here)
        return not first.is_waiting and first.round_id != self._round_id

    def _gone(self) -> Machine | None:
        """Return a machine without which there will be no round: the first, or one that has ended after a round."""
        numbers = {one.node_rank for one in self.machines.here}
        for one in self.machines.all:
            has_left = bool(one.ended and self._round_id) and one.node_rank not in numbers
            if has_left or (one.number == 0 and not one.is_here):
                return one
        return None

    def _listen_again(self) -> socket.socket:
        deadline = time.monotonic() + _PORT_LIMIT
        while True:
            try:
                return self._listen(*self._place)
            except ConfigError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_INTERVAL)  # nothing tells when a port is left
