"""Mixed precision: float32 unchanged, bfloat16 under autocast, or float16 under autocast with a loss scaler."""

from nb_accelerate.training.precision.precision import GivenScalerStep, OptimizerStep, Precision
from nb_accelerate.training.precision.select import select_precision

__all__ = ["GivenScalerStep", "OptimizerStep", "Precision", "select_precision"]
