"""Names of ``accelerate.scheduler``."""

from nb_accelerate.training.optim import AcceleratedScheduler as AcceleratedScheduler
