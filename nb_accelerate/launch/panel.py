"""What a launch and a pool say about how they run, once when they begin and then in their panels."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from nb_accelerate.display import Facts

if TYPE_CHECKING:
    from nb_accelerate.display.frontend import FrontEnd
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.ranks.sinks import Sink


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
