"""Values that runs have logged, and pictures of them."""

from nb_accelerate.base.records.curves import LABELS, Curve, Line, Points, draw, picture, pieces
from nb_accelerate.base.records.files import read_run
from nb_accelerate.base.records.record import RunRecord

__all__ = ["LABELS", "Curve", "Line", "Points", "RunRecord", "draw", "picture", "pieces", "read_run"]
