"""Names of ``accelerate.state``."""

from nb_accelerate.training.state import *  # noqa: F403 - its __all__
