"""Accumulation windows, and optimizers and schedulers that respect them."""

from nb_accelerate.training.optim.accumulation import AccumulationState
from nb_accelerate.training.optim.optimizer import AcceleratedOptimizer, OptimizerTraining
from nb_accelerate.training.optim.scheduler import AcceleratedScheduler

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AccumulationState",
    "OptimizerTraining",
]
