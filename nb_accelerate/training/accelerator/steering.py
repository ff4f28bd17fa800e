"""Obey the notebook while training runs: save a checkpoint now, end after this epoch.

The notebook writes to the page of one rank. Ranks ask each other after a batch of `Accelerator.resumable` now and then,
and at the end of each epoch: a rank alone that saves, or ends, would leave the others in their next exchange.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import here
from nb_accelerate.training.process.notes import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.state.choices import Prepared


class Steering:
    """What the notebook has asked of the training of one `Accelerator`, as all ranks have agreed.

    Attributes:
        saves: a checkpoint is to be saved now.
        stops: training is to end after this epoch.
        has_uneven_batches: whether ranks have different numbers of batches just now, and so ask each other nothing.
    """

    def __init__(self, collectives: Collectives, prepared: Prepared) -> None:
        self._collectives = collectives
        self._prepared = prepared
        self.saves = self.stops = False
        self.has_uneven_batches = False

    @property
    def asks(self) -> bool:
        """Whether ranks ask each other: they train one model, and a notebook or a launcher reads their pages."""
        return self._collectives.world_size > 1 and here().is_read and bool(self._prepared.models)

    @property
    def own(self) -> tuple[bool, bool]:
        """Whether this rank is asked to save, and to stop."""
        return here().asks_to_save, here().asks_to_stop

    @contextmanager
    def uneven_batches(self) -> Iterator[None]:
        """Ask no other rank in a block in which each comes to the end of an epoch after batches of its own number."""
        self.has_uneven_batches = True
        try:
            yield
        finally:
            self.has_uneven_batches = False

    def agree(self) -> None:
        """Ask all ranks, which call this at the same point of their loops."""
        if self._collectives.world_size == 1:
            self.note([self.own])
        elif self.asks and not self.has_uneven_batches:
            self.note(self._collectives.all_gather_object(self.own))

    def note(self, of_ranks: Iterable[tuple[bool, bool]]) -> None:
        """Note what all ranks were asked: see `own`."""
        for saves, stops in of_ranks:
            self.saves |= saves
            self.stops |= stops

    def save_if_asked(self, save: Callable[[], Path], *, is_main: bool) -> None:
        """Save a checkpoint if all ranks have agreed to. An error is told in the notebook, and training goes on."""
        if not self.saves:
            return
        self.saves = False
        try:
            answer, failed = str(save()), False
        except Exception as error:  # raised by `save_checkpoint` in the notebook
            answer, failed = str(error) or type(error).__name__, True
        here().answer(answer, failed=failed)
        if is_main:
            note(f"not saved: {answer}" if failed else f"saved {answer}")

    @contextmanager
    def loop(self, *, can_save: bool) -> Iterator[None]:
        """Obey in a loop over epochs. What comes after it is refused."""
        here().note_obeying(2 if can_save else 1)
        try:
            yield
        finally:
            here().note_obeying(0)
            self.saves = self.stops = False
