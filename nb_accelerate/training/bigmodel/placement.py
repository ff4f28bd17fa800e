"""Where the weights of a block are: at rest in host memory or in a file, and on a device while the block computes.

A block whose weights stay on its device has no placement. Every other one has one of these::

               at rest                    fetch(), ahead            arrive()                leave()
    Mapped     views of a mapped file     pages come into memory    nothing moves           nothing moves
    Staged     in host memory or mapped   copied to the device      parameters are the      parameters are the
                                                                    copies on the device    resting tensors again

Parameters stay the same objects: their ``data`` is exchanged. They are never on ``meta``.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from nb_accelerate.training.bigmodel.staging import Staging, find, put, unchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nb_accelerate.training.bigmodel.mapped import WeightFiles
    from nb_accelerate.training.bigmodel.staging import DeviceCopies, Resting, Slot


class Placement(ABC):
    """The weights of one block, which are needed on `device` while it computes.

    A copy of a model, by `copy.deepcopy` or pickling, has placements of its own. Its weights are not mapped.

    Args:
        tensors: of each parameter and buffer the module that has it, its name there, and the tensor that it is at rest.
            A tied one is given once for each module that has it. A parameter on ``meta`` is replaced by a new one.
        device: where the block computes.
        files: the files that weights are views of, if any.
        names: of the weights; the names in `files` if there are any.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[nn.Module, str, Tensor]],
        device: torch.device,
        *,
        files: WeightFiles | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.device = device
        self.names = list(names)
        parents = [name.rpartition(".")[0].replace(".", "/") for name in names]
        self.name = os.path.commonpath(parents).replace("/", ".") if names else ""
        self.slots = [(owner, attribute) for owner, attribute, _ in tensors]
        put_at_rest(tensors)
        self._start(files)

    def _start(self, files: WeightFiles | None) -> None:
        """Set what belongs to this process and this object, and is not copied."""
        self._files = files
        self._faults = -1  # of the process, when pages were fetched last

    @property
    def _lacks_pages(self) -> bool:
        """Whether pages may be missing: the process has had to wait for one, of any file, since they were fetched."""
        return self._files is not None and self._faults != self._files.faults.number

    def _fetch_pages(self) -> None:
        if self._files is not None and self._lacks_pages:
            self._faults = self._files.faults.number
            self._files.fetch(self.names)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("device", "names", "name", "slots")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start(None)

    def join(self, staging: Staging) -> None:  # noqa: B027 - for placements that copy
        """Use the stream and the buffers of a schedule, which calls it first."""

    def check(self) -> None:
        """Check the files of the weights: reading one that was cut off would end the process by SIGBUS."""
        if self._files is not None:
            self._files.check(self.names)

    @abstractmethod
    def is_wanted(self, *, used: bool) -> bool:
        """Return whether the block should be fetched ahead. Called at each block, so it takes microseconds.

        Args:
            used: it has computed since the model began, as far as known: the user may change it before the next time.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Bring the weights near, so that `arrive` does not wait long. Called ahead, by the thread of the schedule."""

    @abstractmethod
    def arrive(self) -> None:
        """Let the current stream use the weights on the device. Calls are counted: the first one arrives."""

    def leave(self) -> None:  # noqa: B027 - what did not move need not return
        """Put the weights to rest again, at the last call. A call in a thread that has not arrived does nothing."""

    def drop(self) -> None:  # noqa: B027
        """Give back what `fetch` has brought and nobody uses."""


def put_at_rest(tensors: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Give modules tensors as they are at rest. A parameter stays the same object, unless it was on ``meta``."""
    made: dict[int, nn.Parameter] = {}
    for owner, name, resting in tensors:
        tensor = find(owner, name)
        if isinstance(tensor, nn.Parameter) and tensor.is_meta:
            new = made.setdefault(id(tensor), nn.Parameter(resting, requires_grad=tensor.requires_grad))
            owner.register_parameter(name, new)
        elif tensor is not resting:
            put(owner, name, resting)


class Mapped(Placement):
    """A block that computes on the CPU from views of mapped files, or from what else is in host memory."""

    _has_fetched = False  # and has not computed since

    @override
    def is_wanted(self, *, used: bool = False) -> bool:
        return self._lacks_pages

    @override
    def fetch(self) -> None:
        self._fetch_pages()
        self._has_fetched = True

    @override
    def arrive(self) -> None:
        if not self._has_fetched:
            self._fetch_pages()
        self._has_fetched = False
        self.check()


class Staged(Placement):
    """A block that is copied to another device for as long as it computes.

    What it writes to them meanwhile is kept, but for what it writes to a parameter through ``.data``. It may not return
    a view of a weight: the memory is used again.
    A weight that is changed in place through ``.data`` in the tenth of a second after its block was fetched ahead, and
    before it has computed, is seen at the next time only; changes by any other way are seen at once.
    """

    @override
    def _start(self, files: WeightFiles | None) -> None:
        super()._start(files)
        self._staging = Staging(self.device)
        self._copies: DeviceCopies | None = None
        self._copied: list[Resting] = []
        self._users: list[int] = []
        self._swapped: list[Slot] = []

    @override
    def join(self, staging: Staging) -> None:
        self._staging = staging
        staging.make_room(sum(each.tensor.nbytes for each in self._at_rest()))

    @override
    def is_wanted(self, *, used: bool = False) -> bool:
        return not used

    @override
    def fetch(self) -> None:
        try:
            self._stage()
        except torch.OutOfMemoryError:
            """`arrive` tries again, when the block before this one has left."""

    def _stage(self) -> None:
        with self._staging.filling:
            if self._copies is not None:
                return
            self._fetch_pages()
            with self._staging.lock:
                self._copied = self._at_rest()
            self._copies = self._staging.send([each.tensor for each in self._copied])

    def _at_rest(self) -> list[Resting]:
        """Return the tensors that the modules of the block hold now. A name that a module no longer has is left out."""
        resting = (self._staging.swaps.at_rest(*slot) for slot in self.slots)
        return [each for each in resting if each is not None]

    @override
    def arrive(self) -> None:
        while not self._enter():
            self._stage()

    def _enter(self) -> bool:
        """Use the copies on the device. False if there are none, or the user has changed the weights since."""
        with self._staging.lock:
            if self._copies is None or not (self._users or unchanged(self._copied, self._at_rest())):
                self._copies = None
                return False
            try:
                if not self._users:
                    for each, tensor in zip(self._copied, self._copies.tensors, strict=True):
                        # Noted before it is done: an interrupt in between restores what was not swapped, which does
                        # nothing; the other way round a parameter would stay on the device.
                        self._swapped.append(each.slot)
                        self._staging.swaps.swap(*each.slot, tensor)
                self._staging.wait_for(self._copies)
                self._users.append(threading.get_ident())
            finally:
                if not self._users:  # interrupted
                    self._restore()
            return True

    @override
    def leave(self) -> None:
        with self._staging.lock:
            thread = threading.get_ident()
            if thread not in self._users:
                return
            self._staging.use_again()
            self._users.remove(thread)
            if not self._users:
                self._restore()
                self._copies = None

    def _restore(self) -> None:
        while self._swapped:
            self._staging.swaps.restore(*self._swapped.pop())

    @override
    def drop(self) -> None:
        with self._staging.lock:
            if not self._users:
                self._copies = None
