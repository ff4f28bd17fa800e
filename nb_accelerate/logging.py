"""Names of ``accelerate.logging``."""

from nb_accelerate.compat.output import (
    MultiProcessAdapter as MultiProcessAdapter,
    get_logger as get_logger,
)
