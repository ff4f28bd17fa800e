"""Names of ``accelerate.local_sgd``."""

from nb_accelerate.accelerator.local_sgd import LocalSGD as LocalSGD
