"""A flag that any rank can raise and all ranks see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nb_accelerate.comm.collectives import Collectives


class Trigger:
    """Whether this rank has something to tell the others, early stopping say."""

    def __init__(self) -> None:
        self.is_set = False

    def check(self, collectives: Collectives) -> bool:
        """Return whether any rank has set its trigger, and take all back. All ranks call it together."""
        raised = collectives.all_reduce(torch.tensor(int(self.is_set), device=collectives.device))
        self.is_set = False
        return bool(raised.item())
