"""Names of ``accelerate.utils.launch``."""

from nb_accelerate.compat.launching import PrepareForLaunch as PrepareForLaunch
