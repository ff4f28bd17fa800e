"""The states of a process's random numbers: ranks begin with those of the notebook, all with the same."""

from __future__ import annotations

import contextlib
import importlib
import random
import secrets
import sys
from dataclasses import dataclass
from typing import Any

from nb_accelerate.base.imported import imported


@dataclass(frozen=True, kw_only=True)
class RandomStates:
    """The states of Python's random numbers, NumPy's, and torch's on the CPU."""

    python: tuple[Any, ...]
    # Of ``numpy.random``: key, position, and a number of a normal distribution that was drawn with another. A seed
    # where NumPy is not imported, so that nobody has seeded it; None with a bit generator that is not NumPy's default
    # one.
    numpy: tuple[bytes, int, int, float] | int | None
    torch: bytes | None  # none where torch is not imported, so that nobody has seeded it

    @classmethod
    def here(cls) -> RandomStates:
        # Torch may lack the attribute, because another thread is importing it.
        get_state = getattr(imported("torch"), "get_rng_state", None)
        return cls(
            python=random.getstate(),
            numpy=_of_numpy(),
            torch=None if get_state is None else bytes(get_state().tolist()),
        )

    def use(self) -> None:
        """Give this process these states. GPUs are seeded with the last seed of torch, without being touched."""
        random.setstate(self.python)
        if self.numpy is not None:
            with contextlib.suppress(ImportError, ValueError):  # there is another bit generator here
                numpy: Any = importlib.import_module("numpy")
                if isinstance(self.numpy, int):
                    numpy.random.seed(self.numpy)
                else:
                    key, *rest = self.numpy
                    numpy.random.set_state(("MT19937", numpy.frombuffer(key, numpy.uint32), *rest))
        if self.torch is not None:
            import torch

            state = torch.frombuffer(bytearray(self.torch), dtype=torch.uint8)
            torch.set_rng_state(state)
            # That of every device too, once it is used. Torch keeps the stack of who asked, for which it reads sources.
            limit, sys.tracebacklimit = getattr(sys, "tracebacklimit", None), 0
            torch.manual_seed(torch.initial_seed())
            sys.tracebacklimit = limit
            torch.set_rng_state(state)


def _of_numpy() -> tuple[bytes, int, int, float] | int | None:
    # NumPy may lack the attribute, because another thread is importing it. To import it here costs time and threads.
    numpy_random = getattr(imported("numpy"), "random", None)
    if numpy_random is None:
        return secrets.randbits(32)
    state = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    return state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"], state["gauss"]
