"""Mixed precision: float32 unchanged, bfloat16 under autocast, or float16 under autocast with a loss scaler."""

from nb_accelerate.training.precision.precision import Precision
from nb_accelerate.training.precision.select import select_precision
from nb_accelerate.training.precision.step import GivenScalerStep, OptimizerStep

__all__ = ["GivenScalerStep", "OptimizerStep", "Precision", "select_precision"]
