"""Say how a launch or a pool runs: in one line when it begins, then in its panel, and before lines of its ranks."""

from __future__ import annotations

import inspect
import string
import uuid
from typing import TYPE_CHECKING, Any

from nb_accelerate.base import words
from nb_accelerate.base.devices.host import num_cpus
from nb_accelerate.base.records.naming import is_secret
from nb_accelerate.notebook.display.view import Facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.display.frontend import FrontEnd
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.ranks.output.sinks import Sink

_MAX_TEXT = 100  # characters of a text that tells a run from another one


def announce(plan: LaunchPlan, sink: Sink, front_end: FrontEnd) -> str:
    """Show one line about a plan, at once: a launch takes seconds if PyTorch is to be imported first."""
    waits = ": waiting for the other machines" if plan.num_nodes > 1 else ""
    if front_end != "widget":
        sink.write(sink.own_stream, f"{plan.brief}{waits}\n")
        return ""
    display_id = uuid.uuid4().hex
    data = {"text/plain": plan.brief + (waits or ": starting")}
    sink.display("display_data", {"data": data, "metadata": {}, "transient": {"display_id": display_id}})
    return display_id


def facts_of(name: str, plan: LaunchPlan, config: Mapping[str, Any] | None = None) -> Facts:
    """Return what a panel says about a launch or cell that does not change."""
    settings: dict[str, Any] = {"ranks": plan.world_size, "device": plan.device}
    setup = [words.plural(plan.world_size, "rank")]
    setup += [f"{plan.num_nodes} machines"] if plan.num_nodes > 1 else []
    setup.append(plan.device.upper())
    setup += [plan.backend] if plan.world_size > 1 else []
    setup += [plan.mixed_precision] if plan.mixed_precision != "no" else []
    return Facts(
        name=name,
        setup=tuple(setup),
        brief=plan.brief,
        details=plan.describe(),
        cores=num_cpus(),
        config=config or {},
        settings=settings if config is None else {**settings, "start": "fresh"},  # a cell trains on with what is there
    )


def simple_arguments(options: LaunchOptions) -> dict[str, Any]:
    """Return the arguments of a function, with its defaults, that are numbers or short texts, by name."""
    try:
        bound = inspect.signature(options.function).bind(*options.args, **options.kwargs)
    except (TypeError, ValueError):  # the call will raise it; or the function has no signature
        return {}
    bound.apply_defaults()
    given = {**bound.arguments, **options.kwargs}
    simple = (bool, int, float, type(None))
    return {
        name: value
        for name, value in given.items()
        if (type(value) in simple or (type(value) is str and len(value) <= _MAX_TEXT)) and not is_secret(name, value)
    }


def line_prefix(template: str | None, local_ranks: Mapping[int, int]) -> Callable[[Sequence[int]], str] | None:
    """Return a function that returns the prefix for lines of a rank, from torchrun's template; None is no prefix."""
    if template is None:
        return None if len(local_ranks) == 1 else lambda _: ""
    by_rank = {
        rank: string.Template(template).substitute(rank=rank, local_rank=local_rank, role_name="default")
        for rank, local_rank in local_ranks.items()
    }
    return lambda ranks: by_rank[ranks[0]]
