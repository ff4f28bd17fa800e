"""Values that runs have logged, and pictures of them."""

from nb_accelerate.base.records.curves import (
    LABELS,
    SMOOTHED_FROM,
    Curve,
    Line,
    Plot,
    Points,
    draw,
    is_wide,
    legend,
    picture,
    pieces,
    smoothed,
)
from nb_accelerate.base.records.files import read_run
from nb_accelerate.base.records.record import RunRecord, is_training_loss
from nb_accelerate.base.records.table import Runs

__all__ = [
    "LABELS",
    "SMOOTHED_FROM",
    "Curve",
    "Line",
    "Plot",
    "Points",
    "RunRecord",
    "Runs",
    "draw",
    "is_training_loss",
    "is_wide",
    "legend",
    "picture",
    "pieces",
    "read_run",
    "smoothed",
]
