"""The functions behind ``%%distributed``, for programs."""

from nb_accelerate.notebook.pool import *  # noqa: F403 - its __all__
