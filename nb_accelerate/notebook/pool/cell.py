"""Make the request that runs a cell: with what was packed for it, its panel, and what to note at its end."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors.traceback_lines import cell_name
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.display.panel import Action
from nb_accelerate.notebook.launch.description import facts_of
from nb_accelerate.notebook.pool.namespace_sync import Sent
from nb_accelerate.notebook.protocol.messages import RunCell
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause
from nb_accelerate.notebook.ranks.request_panel import RequestView, make_panel
from nb_accelerate.notebook.ranks.steering_buttons import steering_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.pool.group import RankGroup
    from nb_accelerate.notebook.pool.options import CellOptions
    from nb_accelerate.notebook.pool.packing import Shipment
    from nb_accelerate.notebook.pool.plan import CellPlan
    from nb_accelerate.notebook.pool.rank import PoolRank
    from nb_accelerate.notebook.pool.source import CellSource
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.output.sinks import Sink
    from nb_accelerate.notebook.ranks.request import Request
    from nb_accelerate.notebook.ranks.timeouts import Timeouts


class Cell:
    """A cell that is ready to run: the variables that ranks lack are packed.

    Args:
        shipments: what was packed by `plan`; closed when the request is done.
        in_background: whether nobody waits for it, so that its failure is said in the cell.

    Attributes:
        request: the request to the ranks. `begin` it, or `close` the cell.
        trained: models of the notebook that it has trained on the ranks, by name; known at its end.
    """

    def __init__(
        self,
        source: CellSource,
        options: CellOptions,
        group: RankGroup,
        ranks: Sequence[PoolRank],
        plan: CellPlan,
        shipments: Sequence[Shipment],
        output: RequestOutput,
        sink: Sink,
        *,
        in_background: bool,
    ) -> None:
        self._source = source
        self._options = options
        self._group = group
        self._syncs = plan.syncs
        self._variables = plan.variables
        self._output = output
        self.trained: dict[str, weakref.ref[Any]] = {}
        self._packed = {rank: shipment.packed for shipment in shipments for rank in shipment.ranks}
        # Plan and shipments are not kept: they would keep values that the notebook deletes while the cell runs.
        self._sent = {}
        for shipment in shipments:
            values = {
                name: Sent.of(name, value, plan.snapshots.get(name), shipment.uses)
                for name, value in shipment.values.items()
            }
            self._sent.update(dict.fromkeys(shipment.ranks, (values, shipment.contents, shipment.uses)))
        try:
            request = self.request = group.request(ranks, self._send, timeout=options.timeout, say=output.say)
            request.attended = request.is_raised = not in_background
            request.callbacks.append(self.close)
            if in_background:
                request.callbacks.append(lambda: tell_failure(request, output.say))
            with output.guard:
                self._add_panel(sink)
        except BaseException:
            self.close()
            raise

    def begin(self, timeouts: Timeouts) -> None:
        """Ask the ranks to run it."""
        self._group.loop.begin(self.request, self._output, hangs=timeouts)

    def wait(self) -> None:
        """Wait for its end. Interrupts are passed on to the ranks."""
        self._group.loop.wait_for(self.request)

    def take_note(self) -> None:
        """Note, at its end, which names the ranks have received and bound, and how many collectives they have seen."""
        ranks = self._group.ranks
        for number, end in self.request.cell_ends.items():
            sync = self._syncs[number]
            if end.has_names and number in self._sent:
                sync.sent(*self._sent[number])
            sync.gone(end.gone)
            sync.bound(end.bound)
            sync.unbound(end.unbound)
            ranks[number].steps = end.steps
            for name in end.trained:
                if hasattr(type(self._variables.get(name)), "parameters"):
                    self.trained[name] = weakref.ref(self._variables[name])

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt on the ranks, and end the cell."""
        self._group.loop.interrupt(self.request)

    def close(self) -> None:
        """Close what was packed."""
        for packed in self._packed.values():
            packed.close()

    def _send(self, rank: PoolRank) -> None:
        source = self._source
        packed = self._packed.get(rank.rank)
        message = RunCell(
            code=source.code,
            filename=source.filename,
            source=source.text,
            above=source.above,
            is_python=source.is_python,
            names=packed.parcel if packed else None,
            wants_value=self._options.wants_values,
            wants_accelerator=source.wants_accelerator,
            num_ranks=len(self._syncs),
            converts=self._options.converts,
        )
        with contextlib.suppress(ConnectionError):  # it has just ended, which its status tells
            rank.handle.ask(message, packed.fds if packed else ())

    def _add_panel(self, sink: Sink) -> None:
        request, plan = self.request, self._group.plan
        front_end = "off" if self._options.quiet else choose_front_end(self._options.progress)
        stop = Action("Interrupt", "raise KeyboardInterrupt on every rank; variables stay", self.interrupt)
        steering = steering_actions(request, plan.num_processes, note=self._output.note, say=self._output.say)
        for rank in request.ranks:
            rank.handle.page.want_rows(front_end != "off")
        name = (cell_name(self._source.filename) or "cell").replace("Cell In[", "cell ").rstrip("]")
        facts = facts_of(name, plan)
        numbers = [rank.rank for rank in request.ranks]
        if len(numbers) < plan.num_processes:
            facts = replace(facts, setup=(f"{label(numbers)} of {plan.num_processes}", *facts.setup[1:]))
        request.panel = make_panel(facts, numbers, sink, RequestView(request, (stop, *steering)), front_end)


def tell_failure(request: Request, say: Callable[[str], object]) -> None:
    """Say what went wrong in a cell in the background. Runs no code of users."""
    if request.incidents:
        cause = first_cause(request.incidents)
        hint = "" if cause.kind is IncidentKind.INTERRUPTED else "; .result() raises it here"
        say(said_of(cause, request).removesuffix(".") + hint)
