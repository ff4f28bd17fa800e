"""What `nb-accelerate launch` runs, and the plan for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.notebook.launch.plan import make_plan
from nb_accelerate.notebook.worker.script import run_module, run_program, run_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.launch.machine import MachineFacts
    from nb_accelerate.notebook.launch.plan import LaunchPlan


@dataclass(frozen=True, kw_only=True)
class Job:
    """The program that each rank runs.

    Attributes:
        target: path of a script, name of a module, or a program.
        kind: ``script``, ``module`` or ``program``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    kind: str = "script"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command line that would start one rank by hand."""
        python = {"script": (sys.executable,), "module": (sys.executable, "-m"), "program": ()}[self.kind]
        return (*python, self.target, *self.arguments)

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Return the function that a rank calls, and its arguments."""
        if self.kind == "program":
            return run_program, (self.command,)
        return (run_module if self.kind == "module" else run_script), (self.target, self.arguments)


def options_for(job: Job, **options: Any) -> LaunchOptions:
    """Return the options of a launch that runs a job."""
    function, args = job.call
    return LaunchOptions(function=function, args=args, **options)


def planned(options: LaunchOptions, facts: MachineFacts) -> LaunchPlan:
    """Return the plan of a launch from a terminal."""
    return make_plan(options, facts, may_copy=False)  # nothing is in memory here; a server has torch imported
