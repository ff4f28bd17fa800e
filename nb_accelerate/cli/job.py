"""What `nb-accelerate launch` runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.worker.script import run_module, run_program, run_script

if TYPE_CHECKING:
    from collections.abc import Callable


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
