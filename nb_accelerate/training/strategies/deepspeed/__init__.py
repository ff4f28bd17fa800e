"""Train with DeepSpeed. The library is imported when a strategy is made, and not before."""

from nb_accelerate.training.strategies.deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]
