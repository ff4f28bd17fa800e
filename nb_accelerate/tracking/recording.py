"""What an `Accelerator` records, and where: checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.profiling import ProfileKwargs
from nb_accelerate.config.project import ProjectConfiguration, resolve_project
from nb_accelerate.tracking.select import filter_trackers

if TYPE_CHECKING:
    import os

    from nb_accelerate.config.project import LoggerType
    from nb_accelerate.tracking.tracker import GeneralTracker


@dataclass(kw_only=True)
class Recording:
    """What is recorded.

    Attributes:
        project: where files go.
        log_with: trackers, by name or as objects.
        profile: how blocks are profiled.
        trackers: those that are open.
    """

    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    log_with: list[str | LoggerType | GeneralTracker] = field(default_factory=list)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)
    trackers: list[GeneralTracker] = field(default_factory=list)


def resolve_recording(
    log_with: Any,
    project_dir: str | os.PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    profile: ProfileKwargs,
) -> Recording:
    """Check the arguments of an `Accelerator` that are about recording.

    Raises:
        ConfigError: a tracker is not known, or has no folder to write to.
        MissingDependencyError: the library of a tracker is not installed.
    """
    project = resolve_project(project_dir, project_config)
    return Recording(project=project, log_with=filter_trackers(log_with, project.logging_dir), profile=profile)
