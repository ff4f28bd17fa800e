"""Names of ``accelerate.local_sgd``."""

from nb_accelerate.training.accelerator.local_sgd import LocalSGD as LocalSGD
