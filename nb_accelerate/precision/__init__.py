"""Which numbers a model computes with: float32 as it is, bfloat16, or float16 with a loss scaler."""

from nb_accelerate.precision.fp16 import GivenScalerStep
from nb_accelerate.precision.precision import OptimizerStep, Precision
from nb_accelerate.precision.select import select_precision

__all__ = ["GivenScalerStep", "OptimizerStep", "Precision", "select_precision"]
