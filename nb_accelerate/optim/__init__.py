"""Accumulation windows, and optimizers and schedulers that respect them."""

from nb_accelerate.optim.accumulation import AccumulationState
from nb_accelerate.optim.clipping import clip_grad_norm, clip_grad_value
from nb_accelerate.optim.optimizer import AcceleratedOptimizer, OptimizerTraining
from nb_accelerate.optim.scheduler import AcceleratedScheduler

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AccumulationState",
    "OptimizerTraining",
    "clip_grad_norm",
    "clip_grad_value",
]
