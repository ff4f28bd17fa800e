"""Checkpoints that are written while training goes on.

::

    main thread                                   thread of the save
    join the save before, make a staging folder
    copy all states to host memory            ->  write this rank's files
    return a handle, train                        tell the others through the store: written, or what failed
                                                  rank 0: all have -> publish; one has not -> discard
    count the steps of optimizers             ->  one has failed: all agree on the step after which that is raised
    that step, handle.wait(), the next save,  <-  every rank learns how it ended
    the end

Collectives of the default group would get mixed up with those of the training, whose order the main threads decide.
The store has no order. Ranks are waited for as long as their process group is there, and for its timeout. One that is
killed, or that was interrupted before its thread began, ends the save on all of them; the checkpoint that was there
before stays.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import here
from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

logger = logging.getLogger("nb_accelerate")

_BEGIN = 1.0
"""Seconds for a thread to begin that may have been started when its start was interrupted."""


_WAIT = timedelta(seconds=1)
"""For what ranks say, until it is looked whether their process group is still there."""


class StoreExchange:
    """Tells the ranks of the default process group what each of them has to say, in any thread.

    Args:
        store: that all of them share; of this thread alone.
        timeout: in seconds, for what a rank says.

    Attributes:
        has_lost_rank: one did not come, so there is no use in waiting for it again.
    """

    def __init__(self, store: Any, group: dist.ProcessGroup, *, timeout: float) -> None:
        self._store = store
        self._group = weakref.ref(group)
        self._timeout = timeout
        self._rank = group.rank()
        self._world_size = group.size()
        self._rounds = 0
        self.has_lost_rank = False

    @classmethod
    def open(cls, name: str) -> StoreExchange:
        """Return one for the process group that this process is in.

        Args:
            name: of the exchange, the same on all ranks, and never used again.
        """
        group = dist.group.WORLD
        assert group is not None
        whole: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one all ranks share
        # Calls of this one do not wait for those of another thread.
        store: Any = dist.PrefixStore(f"nb_accelerate/background saves/{name}", whole.clone())  # type: ignore[attr-defined]
        return cls(store, group, timeout=whole.timeout.total_seconds())

    def gather(self, action: Callable[[], object]) -> list[Any]:
        """Return what ``action`` returns on each rank, in rank order. All ranks call it.

        Args:
            action: returns what JSON can hold. Whoever reaches the port of a store may write to it, so nothing in it is
                unpickled.

        Raises:
            CheckpointError: it failed on one of them, on all ranks; or a rank did not come.
        """
        error: BaseException | None = None
        result: object = None
        try:
            result = action()
        except BaseException as caught:  # SystemExit too: the others wait for what this rank says
            error = caught
        told = self._tell((None if error is None else f"{type(error).__name__}: {error}", result))
        if error is not None:
            raise error
        failed = [f"on rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text is not None]
        if failed:
            raise CheckpointError("\n".join(failed))
        return [value for _, value in told]

    def abandon(self, error: BaseException) -> None:
        """Tell the others, who may have begun, that this rank takes no part: they wait for what it says first."""
        self._say((f"{type(error).__name__}: {error}", None))
        self._rounds += 1
        self._say((None, 0))  # to `CheckpointHandle.agree_on_step`: its main thread has been told
        self._store.set(f"read {self._rank}", b"")

    def close(self) -> None:
        """Let rank 0, which may serve the store, wait until all have read everything; remove what was said."""
        self._store.set(f"read {self._rank}", b"")
        if self._rank == 0:
            read = [f"read {rank}" for rank in range(self._world_size)]
            self._wait_for(read)
            said = [_key(number, rank) for number in range(self._rounds) for rank in range(self._world_size)]
            for key in (*read, *said):
                self._store.delete_key(key)

    def _say(self, value: object) -> None:
        self._store.set(_key(self._rounds, self._rank), json.dumps(value))

    def _tell(self, value: object) -> list[Any]:
        self._say(value)
        keys = [_key(self._rounds, rank) for rank in range(self._world_size)]
        self._rounds += 1
        if lost := self._wait_for(keys):
            self.has_lost_rank = True
            raise CheckpointError(f"rank {lost[0]} did not finish its part of a checkpoint.")
        try:
            return [json.loads(self._store.get(key)) for key in keys]
        except ValueError as error:
            raise CheckpointError(f"what the ranks said of a checkpoint cannot be read: {error}") from error

    def _wait_for(self, keys: Sequence[str]) -> list[int]:
        """Wait for a key of each rank. Return the ranks that have not set theirs, and will not."""
        deadline = time.monotonic() + self._timeout
        while True:
            # Before the keys: a pool makes a new group when it has lost a rank.
            is_over = self._has_been_replaced or time.monotonic() >= deadline
            try:
                self._store.wait(list(keys), _WAIT)
            except dist.DistNetworkError:  # who serves the store has gone
                raise
            except RuntimeError:  # the time is over: a file raises no subclass
                if is_over:
                    return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            else:
                return []

    @property
    def _has_been_replaced(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is not self._group()


def _key(number: int, rank: int) -> str:
    return f"{number}/{rank}"


class CheckpointHandle:
    """A checkpoint that is being written; what ``save_state(..., async_save=True)`` returns.

    Attributes:
        folder: where it will be.
        was_told: it has failed, and `wait` has raised that.
    """

    def __init__(self, folder: Path, write: Callable[[], object]) -> None:
        self.folder = folder
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self.was_told = False
        self._num_steps = 0
        self._raised_after = 0  # number of steps after which an error is raised
        self._is_failing = False
        self._has_agreed = threading.Event()
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._thread = HelperThread(self._run, write, name="save")

    def begin(self) -> None:
        """Begin to write.

        Raises:
            RuntimeError: there are too many threads. It has then ended.
        """
        try:
            self._thread.start()
        except BaseException:  # an interrupt may come when the thread has begun
            if not self._begun.wait(_BEGIN):
                self._ended.set()
            raise

    @property
    def has_begun(self) -> bool:
        """Whether its thread has."""
        return self._begun.is_set()

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is there on all ranks, and return its folder.

        Args:
            timeout: in seconds; by default as long as it takes.

        Raises:
            CheckpointError: it could not be written, on this rank or another; what was there is there still.
            TimeoutError: it has not ended yet. It goes on.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self.folder} has not been written within {timeout} s; it goes on.")
        if self._begun.is_set():
            self._thread.join()
        if self._error is not None:
            self.was_told = True
            raise BaseException.with_traceback(self._error, self._traceback)  # each time as it was
        return self.folder

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error that nobody was told."""
        return self._ended.is_set() and self._error is not None and not self.was_told

    def end_step(self) -> bool:
        """Count a step of an optimizer, and return whether an error of this save is to be raised after it."""
        self._num_steps += 1
        if not self._is_failing or self.was_told:
            return False
        self._has_agreed.wait()
        return self._num_steps >= self._raised_after

    def agree_on_step(self, exchange: StoreExchange | None) -> None:
        """Agree with the other ranks on the step after which its error is raised. Called in the thread of the save.

        A rank that raised it alone would leave the others waiting for its gradients. A rank that ends a step meanwhile
        waits for the agreement, so no rank is past the step that is agreed on.

        Args:
            exchange: with the others; None where there are none.
        """
        self._is_failing = True  # before steps are read: those that end from now on wait
        num_steps = self._num_steps
        try:
            if exchange is not None and not exchange.has_lost_rank:
                self._raised_after = max(exchange.gather(lambda: num_steps)) + 1
        except Exception:  # a rank has died meanwhile: raised after the next step
            logger.debug("the ranks could not agree when to raise the error of a checkpoint", exc_info=True)
        finally:
            self._has_agreed.set()

    def close(self) -> None:
        """Wait, at the end of a process, and say what nobody was told."""
        self._ended.wait()
        if self._begun.is_set():
            self._thread.join()  # it still frees tensors, in C++ that Python's end would stop by an abort
        if self._error is not None and not self.was_told:
            logger.error("%s was not saved: %s", self.folder, self._error)

    def _run(self, write: Callable[[], object]) -> None:
        self._begun.set()
        try:
            write()
        except BaseException as error:  # kept for wait(), in the thread that asks
            self._error, self._traceback = error, error.__traceback__
            self._has_agreed.set()
            self._is_failing = True
        finally:
            self._ended.set()


class BackgroundSaves:
    """The save of this process that is under way: one at a time."""

    def __init__(self) -> None:
        self._handle: CheckpointHandle | None = None
        self._closes_at_exit = False

    def start(
        self, folder: Path, write: Callable[[StoreExchange | None], object], exchange: StoreExchange | None
    ) -> CheckpointHandle:
        """Write in a thread. `join` comes before.

        Args:
            write: does it; given what it tells other ranks with.
            exchange: that; None where there are no others.
        """
        assert self._handle is None, "the save before was not joined"
        page = here()

        def run() -> None:
            try:
                write(exchange)
            except BaseException:
                handle.agree_on_step(exchange)
                raise
            finally:
                try:
                    if exchange is not None:
                        exchange.close()
                finally:
                    page.save_in_background(False)

        handle = CheckpointHandle(folder, run)
        try:
            page.save_in_background(True)
            self._handle = handle  # before it begins: an interrupt must not lose it
            self._close_at_exit()
            handle.begin()
        except BaseException:
            if not handle.has_begun:  # so nothing will be written, and nobody has to wait for it
                self._handle = None
                page.save_in_background(False)
            raise
        return handle

    @property
    def has_failed(self) -> bool:
        """Whether the save under way has ended with an error that nobody was told."""
        return self._handle is not None and self._handle.has_failed

    def end_step(self) -> None:
        """Count a step of a prepared optimizer. All ranks take the same steps.

        Raises:
            CheckpointError: the save under way has failed, on this rank or another. All ranks raise it after the same
                step, which is done, and only once. On the rank that failed it may be another exception, such as
                `OSError`.
        """
        if self._handle is not None and self._handle.end_step():
            self.join()

    def join(self) -> Path | None:
        """Wait for the save under way, and return its folder; None if there is none.

        Raises:
            CheckpointError: it failed. The next call returns None. It is raised here also if `CheckpointHandle.wait`
                has raised it before.
        """
        handle = self._handle
        if handle is None:
            return None
        try:
            return handle.wait()
        finally:
            if handle.done():  # else the wait was interrupted: the next save would overwrite what is being written
                self._handle = None

    def forget(self) -> None:
        """Forget the save under way, in a process that was forked from the one that writes it.

        Exit handlers are registered anew: a rank begins by removing those that it inherits.
        """
        self._handle = None
        self._closes_at_exit = False

    def close(self) -> None:
        """Wait for the save under way at the end of the process."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def _close_at_exit(self) -> None:
        """Have `close` called while threads can still be started: `atexit` comes too late for the pools that write.

        `multiprocessing` ends the processes that it forks without `atexit`, but not without this. Ranks of a launch end
        by `atexit` alone, while threads can still be started.
        """
        if not self._closes_at_exit:
            atexit.register(self.close)
            threading._register_atexit(self.close)  # type: ignore[attr-defined]  # noqa: SLF001 - as concurrent.futures
            self._closes_at_exit = True


saves = BackgroundSaves()
"""Those of this process: any `Accelerator` of it waits for the others'."""

os.register_at_fork(after_in_child=saves.forget)
