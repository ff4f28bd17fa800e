"""Names of ``accelerate.scheduler``."""

from nb_accelerate.optim import AcceleratedScheduler as AcceleratedScheduler
