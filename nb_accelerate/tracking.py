"""Names of ``accelerate.tracking``, and `read_run`."""

from nb_accelerate.training.tracking import *  # noqa: F403 - its __all__
