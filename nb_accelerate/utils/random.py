"""Names of ``accelerate.utils.random``."""

from nb_accelerate.compat.exchange import (
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from nb_accelerate.training.process.rng import set_seed as set_seed
