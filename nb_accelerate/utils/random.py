"""Under the names of ``accelerate.utils.random``."""

from nb_accelerate.compat.exchange import synchronize_rng_state, synchronize_rng_states
from nb_accelerate.process.rng import set_seed

__all__ = [
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]
