"""Under the names of ``accelerate.state``."""

from nb_accelerate.compat.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
    do_nothing,
    is_initialized,
)
from nb_accelerate.config.distributed import DistributedType

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]
