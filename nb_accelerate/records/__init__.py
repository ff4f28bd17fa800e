"""Values that runs have logged, and pictures of them."""

from nb_accelerate.records.curves import Curve, Plot, draw
from nb_accelerate.records.record import RunRecord, read_run

__all__ = ["Curve", "Plot", "RunRecord", "draw", "read_run"]
