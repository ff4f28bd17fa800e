"""Run one rank in this very process, for a debugger: breakpoints and ``%debug`` reach users' code directly."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nb_accelerate.base.seam import training_half
from nb_accelerate.notebook.launch.environ import rank_environ
from nb_accelerate.notebook.launch.rendezvous import open_rendezvous
from nb_accelerate.notebook.launch.values import Values
from nb_accelerate.notebook.ranks.output.guard import OutputGuard
from nb_accelerate.notebook.worker.groups import has_group

if TYPE_CHECKING:
    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.ranks.output.sinks import Sink


def run_inline(options: LaunchOptions, plan: LaunchPlan, sink: Sink) -> Values:
    """Call the function in this process, in the environment of a single rank, which is undone afterwards."""
    with OutputGuard(sink):
        sink.close()
    before = dict(os.environ)
    with open_rendezvous(options, plan) as rendezvous:
        os.environ.update(rank_environ(plan, rendezvous, 0, base=before, extra=options.env))
        # A group that is opened in this process makes a store by itself.
        if rendezvous.listener is not None:
            rendezvous.listener.close()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        had_group = has_group()
        try:
            return Values([options.function(*options.args, **options.kwargs)])
        finally:
            if has_group() and not had_group:
                training_half().close_groups()
            os.environ.clear()
            os.environ.update(before)
