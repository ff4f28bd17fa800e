"""Make the request that runs a cell, with its panel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors.traceback_lines import cell_name
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.display.panel import Action
from nb_accelerate.notebook.launch.description import facts_of
from nb_accelerate.notebook.protocol.messages import RunCell
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause
from nb_accelerate.notebook.ranks.request_panel import RequestView, make_panel
from nb_accelerate.notebook.ranks.steerable import steering_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.pool.group import RankGroup
    from nb_accelerate.notebook.pool.options import CellOptions
    from nb_accelerate.notebook.pool.packing import Shipment
    from nb_accelerate.notebook.pool.source import CellSource
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.output.sinks import Sink
    from nb_accelerate.notebook.ranks.proxy import RankProxy
    from nb_accelerate.notebook.ranks.request import Request
    from nb_accelerate.notebook.ranks.timeouts import Timeouts


def cell_request(
    source: CellSource,
    options: CellOptions,
    group: RankGroup,
    ranks: Sequence[RankProxy],
    shipments: Sequence[Shipment],
    output: RequestOutput,
    sink: Sink,
    *,
    hangs: Timeouts,
    in_background: bool,
    display_id: str = "",
) -> Request:
    """Return the request that has ranks run a cell. At its end, it closes what was packed."""
    message = RunCell(
        code=source.code,
        filename=source.filename,
        source=source.text,
        above=source.above,
        is_python=source.is_python,
        wants_value=options.wants_values,
        wants_accelerator=source.wants_accelerator,
        num_ranks=len(ranks),
        converts=options.converts,
    )
    packed = {rank: shipment.packed for shipment in shipments for rank in shipment.ranks}

    def send(rank: RankProxy) -> None:
        names = packed.get(rank.rank)
        if names is None:
            rank.handle.ask(message)
        else:
            rank.handle.ask(replace(message, names=names.parcel), names.fds)

    request = group.request(
        ranks,
        send,
        timeout=options.timeout,
        output=output,
        say=output.say,
        hangs=hangs,
        attended=not in_background,
        is_raised=not in_background,
    )
    request.callbacks += [names.close for names in packed.values()]
    if in_background:
        request.callbacks.append(lambda: tell_failure(request, output.say))
    with output.guard:
        request.panel = output.panel = _panel(request, source, options, group, output, sink, display_id)
    return request


def _panel(
    request: Request,
    source: CellSource,
    options: CellOptions,
    group: RankGroup,
    output: RequestOutput,
    sink: Sink,
    display_id: str,
) -> Panel | None:
    plan = group.plan
    front_end = "off" if options.quiet else choose_front_end(options.progress)
    hint = "raise KeyboardInterrupt on every rank; variables stay"
    stop = Action("Interrupt", hint, lambda: group.loop.interrupt(request))
    actions = (stop, *steering_actions(request, output.note))
    for rank in request.ranks:
        rank.handle.page.want_rows(front_end != "off")
    name = (cell_name(source.filename) or "cell").replace("Cell In[", "cell ").rstrip("]")
    facts = facts_of(name, plan)
    numbers = [rank.rank for rank in request.ranks]
    if len(numbers) < plan.num_processes:
        setup = (f"{label(numbers)} of {plan.num_processes}", *facts.setup[1:])
        facts = replace(facts, setup=setup, settings={**facts.settings, "ranks": len(numbers)})
    return make_panel(facts, numbers, sink, RequestView(request, actions), front_end, display_id)


def tell_failure(request: Request, say: Callable[[str], object]) -> None:
    """Say what went wrong in a cell in the background. Runs no code of users."""
    if request.incidents:
        cause = first_cause(request.incidents)
        hint = "" if cause.kind is IncidentKind.INTERRUPTED else "; .result() raises it here"
        say(said_of(cause, request).removesuffix(".") + hint)
