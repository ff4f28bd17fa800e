"""Names of ``accelerate.inference``."""

from nb_accelerate.compat.refused import prepare_pippy as prepare_pippy
