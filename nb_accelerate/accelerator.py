"""Names of ``accelerate.accelerator``."""

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]
