"""The panel of a launch, and where it is drawn."""

from __future__ import annotations

import sys
import uuid
from typing import TYPE_CHECKING

from nb_accelerate.diagnostics.stacks import listed
from nb_accelerate.display import Facts, Panel
from nb_accelerate.display.block import Block, can_redraw
from nb_accelerate.display.lines import Lines
from nb_accelerate.display.relay import Relay
from nb_accelerate.display.view import Failure
from nb_accelerate.display.widget import Widget
from nb_accelerate.ranks.failures import RankTraceback, summary
from nb_accelerate.ranks.sinks import CellSink, StreamSink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.display import Watched
    from nb_accelerate.display.frontend import FrontEnd
    from nb_accelerate.display.panel import Drawing
    from nb_accelerate.display.view import State
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.ranks.sinks import Sink


def make_panel(
    facts: Facts, ranks: Sequence[int], sink: Sink, watched: Watched, front_end: FrontEnd, *, place: str = ""
) -> Panel | None:
    """A panel for some ranks, or None if nobody wants one.

    Args:
        facts: what runs, and how.
        ranks: to be shown.
        sink: the cell or stream it belongs to.
        watched: the ranks.
        front_end: see `choose_front_end`.
        place: id of a display that the panel takes the place of, see `announce`.
    """
    if front_end == "off":
        return None
    drawing: Drawing
    if front_end == "widget" and isinstance(sink, CellSink):
        drawing = Widget(sink, sink.kernel, ranks, watched, listed, place=place)
    elif front_end == "terminal" and isinstance(sink, CellSink):
        drawing = Relay(sink)
    elif isinstance(sink, StreamSink) and can_redraw(sys.stdout):
        drawing = sink.block = Block(sys.stdout)
    else:
        drawing = Lines(sink, is_notebook=isinstance(sink, CellSink))
    return Panel(facts, ranks, drawing, watched)


def announce(plan: LaunchPlan, sink: Sink, front_end: FrontEnd) -> str:
    """Say in one line what was chosen. Returns the id of the place where a panel may say more; "" if nowhere."""
    if front_end != "widget":
        sink.write("stdout", plan.describe() + "\n")
        return ""
    place = uuid.uuid4().hex
    data = {"text/plain": plan.describe()}
    sink.display("display_data", {"data": data, "metadata": {}, "transient": {"display_id": place}})
    return place


def facts_of(name: str, plan: LaunchPlan, *, details: str = "") -> Facts:
    """What a panel says about how something runs.

    Args:
        name: of what runs.
        plan: how.
        details: to be said at the beginning.
    """
    return Facts(name=name, setup=_setup(plan), details=details)


def _setup(plan: LaunchPlan) -> tuple[str, ...]:
    number = plan.world_size
    parts = ["1 rank" if number == 1 else f"{number} ranks"]
    parts += [f"{plan.num_nodes} machines"] if plan.num_nodes > 1 else []
    parts.append(plan.device.upper())
    parts += [plan.backend] if number > 1 else []
    parts += [plan.mixed_precision] if plan.mixed_precision != "no" else []
    return tuple(parts)


def outcome(error: BaseException | None) -> tuple[State, Failure | None]:
    """How a panel says that a run has ended.

    Args:
        error: why it failed; None if it did not.
    """
    if error is None:
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", None
    cause = error.__cause__
    details = cause.args[0] if isinstance(cause, RankTraceback) else ""
    text = summary(error)
    rank = getattr(error, "_nb_rank", None)
    return "failed", Failure(
        title=text[:1].upper() + text[1:],
        rank=rank if rank is not None else getattr(error, "rank", None),
        label=f"traceback of rank {rank}",
        details=details if rank is not None else "",
    )
