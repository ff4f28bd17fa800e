"""The facade: what a training script talks to."""

from nb_accelerate.training.accelerator.accelerator import Accelerator

__all__ = ["Accelerator"]
