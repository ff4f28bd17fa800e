"""Record to SwanLab."""

from __future__ import annotations

from nb_accelerate.training.tracking.wandb_like import WandBLikeImageTracker


class SwanLabTracker(WandBLikeImageTracker):
    """Record to SwanLab; ``mode="local"`` among the arguments keeps the run on this machine.

    Args:
        run_name: the project.
        **kwargs: those of ``swanlab.init``.
    """

    name = "swanlab"
