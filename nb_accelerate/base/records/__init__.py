"""Values that runs have logged, and pictures of them."""

from nb_accelerate.base.records.curves import LABELS, Curve, Plot, draw, label
from nb_accelerate.base.records.record import RunRecord, read_run

__all__ = ["LABELS", "Curve", "Plot", "RunRecord", "draw", "label", "read_run"]
