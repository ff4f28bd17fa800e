"""Experiment trackers: an adapter for each library, imported when it is used, and two that need none."""

from nb_accelerate.base.records import RunRecord, read_run
from nb_accelerate.training.tracking.libraries import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)
from nb_accelerate.training.tracking.notebook import JSONLinesTracker, NotebookTracker
from nb_accelerate.training.tracking.select import (
    Recording,
    filter_trackers,
    get_available_trackers,
    make_trackers,
    register_tracker_class,
    resolve_recording,
)
from nb_accelerate.training.tracking.tracker import BlankTracker, GeneralTracker, on_main_process

__all__ = [
    "AimTracker",
    "BlankTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLinesTracker",
    "MLflowTracker",
    "NotebookTracker",
    "Recording",
    "RunRecord",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "make_trackers",
    "on_main_process",
    "read_run",
    "register_tracker_class",
    "resolve_recording",
]
