"""Names of ``accelerate.accelerator``."""

from nb_accelerate.training.accelerator import Accelerator

__all__ = ["Accelerator"]
