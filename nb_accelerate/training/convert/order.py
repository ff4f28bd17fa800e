"""`Order`: all ranks of a converted cell come to the same places in the same order, and see the same there.

Each exchange begins with a header: what it is, and in which line. Where these differ, all ranks raise the same error,
which has both lines; a backend that was given different exchanges would end the process, or wait for ever::

    rank 0: model(x), line 3 ----+
    rank 1: end of the cell -----+--> equal: go on; else ConfigError on all ranks, which keep their variables
"""

from __future__ import annotations

import sys
import threading
import traceback
import zlib
from os import getpid  # of this process, also while `os.getpid` is replaced by rank 0's
from typing import TYPE_CHECKING

import torch

from nb_accelerate.errors import ConfigError
from nb_accelerate.errors.traceback_lines import is_users_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from nb_accelerate.training.comm import Collectives

_SAMPLE = 256  # numbers of a tensor that are compared


class Order:
    """Compares what ranks do, before each exchange.

    Attributes:
        is_inside: whether a model or backward runs: there a rank may do what others do not.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._thread, self._pid = threading.get_ident(), getpid()
        self.is_inside = False

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the cell, and no worker of a loader: others exchange nothing with ranks."""
        return threading.get_ident() == self._thread and getpid() == self._pid

    @property
    def is_in_another_thread(self) -> bool:
        """Whether this is the process of the cell, and not its thread."""
        return threading.get_ident() != self._thread and getpid() == self._pid

    def meet(self, what: str, tensors: Sequence[Tensor] = (), *, value: float = 0.0) -> list[float]:
        """Wait until all ranks are here, and return the values that they give."""
        line = line_here()
        sums = [_sums(tensor) for tensor in tensors if tensor.numel()]
        code = zlib.crc32(repr((what, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])).encode())
        header = torch.tensor([code, line, value, 0.0, 0.0], dtype=torch.float64)
        if sums:
            header[3:] = torch.stack(sums).sum(0)
        # Of one size whatever a rank is about to do, so that ranks which part can still exchange it.
        ranks = self._collectives.all_gather(header).tolist()
        if any(rank[:2] != ranks[0][:2] for rank in ranks):
            places = self._collectives.all_gather_object(f"line {line} ({what})")
            other = next(number for number, rank in enumerate(ranks) if rank[:2] != ranks[0][:2])
            raise ConfigError(
                f"rank 0 is at {places[0]}, and rank {other} at {places[other]}, where they cannot exchange anything. "
                "With --convert all ranks take the same way through a cell. What is not the same in all processes is, "
                "for example, datetime.now(), a generator without a seed, the order of a set of strings, id(): let "
                "no branch and no end of a loop depend on it"
            )
        # Kernels of GPUs may add up in different orders.
        if any(abs(rank[3] - ranks[0][3]) > 1e-3 * ranks[0][4] for rank in ranks):
            raise ConfigError(
                f"line {line}: ranks give {what} different rows. With --convert all ranks read the same, and each "
                "computes its part: leave out prepared loaders, samplers for several processes, and seeds by time or "
                "process; give random.Random a seed"
            )
        return [rank[2] for rank in ranks]


def _sums(tensor: Tensor) -> Tensor:
    """Return the sum of some of a tensor's numbers, each with another weight, and the sum of their sizes."""
    tensor = tensor.detach()
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    in_each_dim = max(2, round(_SAMPLE ** (1 / max(tensor.dim(), 1))))
    some = tensor[tuple(slice(None, None, max(1, size // in_each_dim)) for size in tensor.shape)].flatten()
    some = torch.view_as_real(some).flatten() if some.is_complex() else some
    some = some.to(device="cpu", dtype=torch.float64).nan_to_num()
    some = some * torch.linspace(1, 2, len(some), dtype=torch.float64)
    return torch.stack([some.sum(), some.abs().sum()])


def line_here() -> int:
    """Return the line of users' code that runs; 0 if there is none."""
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - as `warnings` does
    return next((lineno for frame, lineno in stack if is_users_file(frame.f_code.co_filename)), 0)
