"""Checkpoints that are written while training goes on.

::

    main thread                                   thread of the save
    join the save before, make a staging folder
    connect the ranks for this save
    copy all states to host memory            ->  write this rank's files
    return a handle, train                        gather what the ranks have written, or what failed
                                                  rank 0: all have -> publish; one has not -> discard
    handle.wait(), the next save, the end     <-  every rank learns how it ended, and logs an error

Collectives of the default group would get mixed up with those of the training, whose order the main threads decide, so
a save has a gloo group. Gloo ends a collective when a rank has gone: one that is killed, or that was interrupted before
its thread began, ends the save on all ranks. The checkpoint that was there before stays.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.base.seam import call_interrupted, call_returned
from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nb_accelerate.base.progress_page.page import ProgressPage

logger = logging.getLogger("nb_accelerate")


class SaveGroup:
    """The ranks of one save, which exchange objects in any thread. All make it together, with its name."""

    def __init__(self, name: str, world_size: int) -> None:
        self._is_alone = world_size == 1
        self._group: Any = None
        if not self._is_alone:
            c10d: Any = dist.distributed_c10d
            store = c10d._get_default_store()  # noqa: SLF001 - the only one that all ranks share
            # Not by `new_group`: that numbers groups, and ranks that were interrupted would number them differently.
            self._group = c10d.ProcessGroupGloo(
                c10d.PrefixStore(f"nb_accelerate/save {name}", store),
                dist.get_rank(),
                world_size,
                timeout=store.timeout,
            )

    def all_gather_object(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in rank order."""
        if self._is_alone:
            return [item]
        if self._group is None:
            raise CheckpointError("a rank did not finish its part of a checkpoint.")
        data = pickle.dumps(item)
        try:
            sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)], device="cpu"))]
            padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8)
            gathered = self._all_gather(padded)
        except RuntimeError as error:
            self.close()  # ranks that wait for this one and not for the one that has gone
            raise CheckpointError(f"a rank did not finish its part of a checkpoint: {error}") from error
        # Only ranks are in the group, see `training.process.loopback`.
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(gathered, sizes, strict=True)]

    def close(self) -> None:
        """Disconnect this rank. Others that wait for it get an error."""
        self._group = None

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        received = [torch.empty_like(tensor) for _ in range(self._group.size())]
        self._group.allgather([received], [tensor]).wait()
        return received


class CheckpointHandle:
    """A checkpoint that is being written; what ``save_state(..., async_save=True)`` returns.

    Attributes:
        folder: where it will be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._claimed = threading.Lock()
        self._thread: HelperThread | None = None

    @classmethod
    def of_ended(cls, folder: Path) -> CheckpointHandle:
        """Return the handle of a save that is over, as in a rehearsal."""
        handle = cls(folder)
        handle._ended.set()
        return handle

    def begin(self, write: Callable[[], object], ranks: SaveGroup) -> None:
        """Call ``write`` in a thread, and close the group of the ranks after it."""
        self._thread = HelperThread(self._run, write, ranks, here(), name="save")
        self._thread.start()

    def claim(self) -> bool:
        """Take the save for the caller; return whether nobody had taken it."""
        # Its thread takes it to write. Where an interrupt comes before the thread, the main thread takes it to drop it.
        return self._claimed.acquire(blocking=False)

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
        self.join()
        if self._error is not None:
            raise self._error
        return self.folder

    def join(self) -> None:
        """Wait until it has ended, well or not."""
        self._ended.wait()
        if self._thread is not None:  # else it is that of a rehearsal
            self._thread.join()  # it still frees tensors, in C++ that Python's end would stop by an abort

    def _run(self, write: Callable[[], object], ranks: SaveGroup, page: ProgressPage) -> None:
        if not self.claim():
            return
        try:
            write()
        # SystemExit too, of a dataset's or a hook's code say: a thread would end by it without a word.
        except BaseException as error:
            self._error = error  # raised by `wait`, in the thread that asks
            logger.error("%s was not saved: %s", self.folder, error)
        finally:
            ranks.close()
            page.save_in_background(False)
            self._ended.set()


class BackgroundSaves:
    """The save of this process that is under way: one at a time."""

    def __init__(self) -> None:
        self._handle: CheckpointHandle | None = None
        self._closes_at_exit = False

    def start(self, handle: CheckpointHandle, write: Callable[[], object], ranks: SaveGroup) -> None:
        """Have a handle write in its thread. `join` comes before."""
        assert self._handle is None, "the save before was not joined"
        here().save_in_background(True)
        self._handle = handle  # before it begins: an interrupt must not lose it
        self._close_at_exit()
        handle.begin(write, ranks)

    def drop(self) -> None:
        """Forget a save that never began."""
        self._handle = None
        here().save_in_background(False)

    def join(self) -> Path | None:
        """Wait for the save under way, and return its folder; None if there is none."""
        handle = self._handle
        if handle is None:
            return None
        try:
            return handle.wait()
        finally:
            if handle.done():  # else the wait was interrupted: the next save would overwrite what is being written
                self._handle = None

    def forget(self) -> None:
        """Forget the save under way, in a process that was forked from the one that writes it."""
        # Exit handlers are registered again: a rank begins by removing the handlers that it inherits.
        self._handle = None
        self._closes_at_exit = False

    def close(self) -> None:
        """Wait for the save under way at the end of the process."""
        # Taken out first, because two kinds of exit handlers may call it.
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.join()

    def keep(self) -> None:
        """Wait for the save under way, which an interrupt of the rank would lose, and have the notebook wait too."""
        if self._handle is not None:
            here().enter(Phase.SAVING)
            self.close()

    def _close_at_exit(self) -> None:
        """Have `close` called while threads can still be started: `atexit` comes too late for the pools that write."""
        # `multiprocessing` ends the processes that it forks without `atexit`, but not without this. Ranks of a launch
        # end by `atexit` alone, while threads can still be started.
        if not self._closes_at_exit:
            atexit.register(self.close)
            threading._register_atexit(self.close)  # type: ignore[attr-defined]  # noqa: SLF001 - as concurrent.futures
            self._closes_at_exit = True


saves = BackgroundSaves()
"""Those of this process: any `Accelerator` of it waits for the others'."""

call_returned.subscribe(saves.join)
call_interrupted.subscribe(saves.keep)
os.register_at_fork(after_in_child=saves.forget)
