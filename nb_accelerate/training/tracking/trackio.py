"""Record to trackio, the local dashboard of Hugging Face."""

from __future__ import annotations

from nb_accelerate.training.tracking.wandb_like import WandBLikeTracker


class TrackioTracker(WandBLikeTracker):
    """Record to trackio, which keeps runs on this machine unless it is told a space.

    Args:
        run_name: the project.
        **kwargs: those of ``trackio.init``.
    """

    name = "trackio"
