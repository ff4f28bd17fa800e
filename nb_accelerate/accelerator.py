"""Names of ``accelerate.accelerator``."""

from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]
