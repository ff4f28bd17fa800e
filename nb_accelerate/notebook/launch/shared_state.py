"""What machines share in the store: torch elastic's state of the rendezvous, and keys of ours for each round of it."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import MachineError
from nb_accelerate.notebook.launch.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

_TYPES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("datetime", "timedelta"),
}
"""What torch elastic's state consists of."""


class _GivenUpError(Exception):
    """Nobody waits any more for what a thread waits for."""


class _StateUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _TYPES:
            raise RuntimeError(f"{module}.{name} is not part of the state of a rendezvous")
        return super().find_class(module, name)


class SharedState:
    """torch elastic's backend, whose state can be read here, and whose waits end when they are given up."""

    name = "c10d"

    def __init__(self, backend: Any, fewest: int, is_given_up: Callable[[], bool]) -> None:
        self._backend = backend
        self._fewest = fewest
        self._is_given_up = is_given_up
        self._now: Any = None

    @property
    def round(self) -> int:
        """Number of the current round."""
        return int(self._now.round)

    @property
    def machines(self) -> list[Machine]:
        """The machines that take part, in the order of their numbers, and then the waiting ones."""
        if self._now is None:
            return []
        waiting = sorted(self._now.wait_list | self._now.redundancy_list)
        return [Machine.from_text(node.addr) for node in (*sorted(self._now.participants), *waiting)]

    def get_state(self) -> Any:
        """Return the state and its token, as torch elastic asks for them."""
        if self._is_given_up():
            raise _GivenUpError
        return self._read(self._backend.get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Set the state if it has not changed since it was read, and return the one that holds, as torch does."""
        return self._read(self._backend.set_state(state, token))

    def leave(self, text: str) -> None:
        """Take a machine out of the state, so that the others need not wait until its heartbeats are missed."""
        is_written = False
        while not is_written and (found := self._read(self._backend.get_state())) is not None:
            now = self._now
            for nodes in (now.participants, now.last_heartbeats):
                for node in [node for node in nodes if node.addr == text]:
                    del nodes[node]
            for nodes in (now.wait_list, now.redundancy_list):
                nodes.difference_update([node for node in nodes if node.addr == text])
            # As torch elastic does when a machine leaves.
            if now.complete and not now.participants:
                now.complete, now.round = False, now.round + 1
            elif not now.complete and len(now.participants) < self._fewest:
                now.deadline = None
            _, _, is_written = self._backend.set_state(pickle.dumps(now), found[1])

    def _read(self, found: Any) -> Any:
        if found is not None:
            # Before torch unpickles it, which would run any code in it.
            self._now = _StateUnpickler(io.BytesIO(found[0])).load()
        return found


@dataclass(frozen=True, kw_only=True)
class Round:
    """The machines whose ranks train together until the next start. Each method asks the store."""

    store: Any  # torch elastic's part of it for this round
    node_rank: int
    machines: list[Machine]  # all that take part, by number
    name: str

    def fail(self, why: str) -> None:
        """Tell the others why the ranks of this machine have ended. The first reason of all machines counts."""
        self.store.compare_set("failed", "", json.dumps([self.node_rank, why]))

    def failure(self) -> MachineError | None:
        """Return why the ranks of another machine have ended."""
        if not self.store.check(["failed"]):
            return None
        number, why = json.loads(self.store.get("failed"))
        return None if number == self.node_rank else MachineError(why, address=self.machines[number].address)

    def say(self, what: str) -> None:
        """Say something of this machine."""
        self.store.set(f"{what} {self.node_rank}", "")

    def ask_who_is_here(self) -> None:
        """Ask the other launches to answer."""
        self.store.set("who is here", "")

    def answer(self) -> None:
        """Answer, if another launch has asked."""
        if self.store.check(["who is here"]):
            self.say("here")

    def without(self, what: str) -> list[Machine]:
        """Return the other machines that have not said something."""
        others = [number for number in range(len(self.machines)) if number != self.node_rank]
        return [self.machines[number] for number in others if not self.store.check([f"{what} {number}"])]
