"""Which numbers a model computes with: float32 as it is, bfloat16, or float16 with a loss scaler."""

from nb_accelerate.precision.precision import Precision
from nb_accelerate.precision.select import select_precision
from nb_accelerate.precision.step import GivenScalerStep, OptimizerStep

__all__ = ["GivenScalerStep", "OptimizerStep", "Precision", "select_precision"]
