"""Names of ``accelerate.accelerator``."""

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin as GradientAccumulationPlugin
from nb_accelerate.base.config.loader import DataLoaderConfiguration as DataLoaderConfiguration
from nb_accelerate.training.accelerator import Accelerator as Accelerator
