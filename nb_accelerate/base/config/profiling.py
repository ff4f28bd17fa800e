"""`ProfileKwargs`: options of `Accelerator.profile`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch.profiler import profile

_SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat", "skip_first_wait")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where `Accelerator.profile` writes the trace.

    Attributes:
        activities: what to record: ``["cpu"]``, ``["cpu", "cuda"]``; None records all there is.
        schedule_option: which steps to record: a dict of ``wait``, ``warmup``, ``active``, ``repeat`` and
            ``skip_first``, the arguments of `torch.profiler.schedule`. Call ``step()`` on the profiler at each step.
        on_trace_ready: called with the profiler when a cycle of the schedule is complete.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations of memory.
        with_stack: record file and line of each operation.
        with_flops: estimate floating point operations.
        with_modules: record which module called an operation.
        output_trace_dir: write ``profile_<process>.json``, a trace for Chrome's and Perfetto's viewers, into this
            folder: one for each process.

    Raises:
        ConfigError: a value is of the wrong type, or not a choice.
    """

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    @override
    def _check(self) -> None:
        super()._check()
        if isinstance(self.activities, str):
            raise ConfigError(f"activities={self.activities!r} is one word. Write activities=[{self.activities!r}].")
        for activity in self.activities or ():
            check_choice("activities", activity, _activities())
        for name in self.schedule_option or ():
            check_choice("schedule_option", name, _SCHEDULE)

    def build(self) -> profile:
        """Return the profiler: a context manager, with ``step()`` to call at each step."""
        from torch import profiler

        options = self.to_dict()
        del options["output_trace_dir"]
        activities, schedule = options.pop("activities") or (), options.pop("schedule_option")
        return profiler.profile(
            activities=[_activities()[name.lower()] for name in activities] or None,
            schedule=profiler.schedule(**schedule) if schedule else None,
            **options,
        )


def _activities() -> dict[str, Any]:
    """Return what this build of torch can record, by its name in small letters."""
    from torch.profiler import ProfilerActivity

    return {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
