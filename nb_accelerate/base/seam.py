"""The seam between the halves: what a rank tells the training half, and what it asks of it.

::

    notebook half                                   training half
    call_returned.fire() ... -------------------->  those who have subscribed; nobody where it is not imported
    training_half().join_group(...) ------------->  `training.in_ranks`, imported for this

A launched function need not use the training half, and a rank does not import it for a function that does not. So what
happens in every rank is an event, to which modules of the training half subscribe when they are imported. What cannot
be done without the training half is a method of `TrainingHalf`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import timedelta

TRAINING_HALF = "nb_accelerate.training.in_ranks"

# Modules of the training half that most ranks need; a server of warm ranks imports them once.
PRELOADED = (TRAINING_HALF, "nb_accelerate.training.accelerator")

# Modules of the training half that such a server imports when it has time.
PRELOADED_LATER = ("nb_accelerate.training.checkpoint.sharded",)


class Event:
    """Something that happens in a rank."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[], object]] = []

    def subscribe(self, listener: Callable[[], object]) -> None:
        """Call a function whenever it happens, in the order of subscription."""
        self._listeners.append(listener)

    def fire(self) -> list[object]:
        """Tell all listeners, and return what they return.

        Raises:
            BaseException: what a listener raises; those after it are not told.
        """
        return [listener() for listener in self._listeners]


# A launched function has returned, and its rank will end. The call fails with what a listener raises.
call_returned = Event()

# A launched function was interrupted, and its rank will end. Listeners finish what must not be lost.
call_interrupted = Event()

# The rank has joined a new process group, because a rank was lost. The others may have failed at different batches.
group_replaced = Event()


# The rank asks whether an `Accelerator` of this process has prepared anything. A listener returns whether one has.
asks_for_prepared = Event()


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """The store through which ranks meet. A descriptor comes with it: the file that is the store, or a socket."""

    # The rank that serves it on the socket is ``server``; the others are ``client``, and get no descriptor.
    kind: Literal["file", "server", "client"]
    address: str  # as in ``MASTER_ADDR``
    port: int  # as in ``MASTER_PORT``
    store_port: int  # where it listens, if it does
    world_size: int
    polls: bool = False  # ranks wait for its keys in Python; see `training.process.group_store.RendezvousHandler`
    part: str = ""  # of it, for these ranks; "" if it is theirs alone


class StoreAccess(Protocol):
    """The access of a rank to the store. It is kept as long as the rank's process groups."""

    def give_up(self) -> None:
        """End waits of this process for other ranks; called in another thread."""


class TrainingHalf(ABC):
    """What ranks need the training half for."""

    @abstractmethod
    def reach_store(self, store: StoreSpec, fd: int, is_given_up: Callable[[], bool] = lambda: False) -> StoreAccess:
        """Make every process group that this process opens from now on meet the other ranks through a store.

        The descriptor that belongs to it is taken over; -1 if there is none. ``is_given_up`` ends waits for others.
        """

    @abstractmethod
    def join_group(self, timeout: timedelta) -> dict[str, Any]:
        """Join the process group of all ranks, a group of one included, and bring DDP models over to it.

        Return the variables that cells get: ``rank``, ``local_rank``, ``world_size``, ``device``. The timeout is for
        collectives.
        """

    @abstractmethod
    def leave_group(self) -> None:
        """Abort and destroy every process group, because `join_group` will make a new one."""

    @abstractmethod
    def abort_groups(self) -> None:
        """Abort the collectives of this process' groups, where their backend can; may be called in another thread."""

    @abstractmethod
    def close_groups(self) -> None:
        """Destroy every process group, and forget the rank and device that this process had in them."""

    @abstractmethod
    def forget_groups(self) -> None:
        """Forget every process group, in a process that was forked from theirs."""

    @abstractmethod
    def make_accelerator(self) -> Any:
        """Return a new `Accelerator`."""

    @abstractmethod
    def converted(self, names: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context in which code for one process, with these variables, shares out its rows."""


def training_half() -> TrainingHalf:
    return cast("TrainingHalf", importlib.import_module(TRAINING_HALF).training_half)
