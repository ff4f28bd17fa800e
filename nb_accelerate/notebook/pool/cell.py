"""Make the request that runs a cell: with the variables to send, the panel, and what to note at its end."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.topology.rank_lists import label, named
from nb_accelerate.errors.traceback_lines import cell_name
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.display.panel import Action
from nb_accelerate.notebook.launch.panel import facts_of
from nb_accelerate.notebook.pool.namespace_sync import RANK_NUMBERS
from nb_accelerate.notebook.pool.shipping import SIZE_LIMIT, make_manifest
from nb_accelerate.notebook.protocol.content import ATOMS, is_constant
from nb_accelerate.notebook.protocol.messages import RunCell
from nb_accelerate.notebook.ranks.failing.errors import said_of
from nb_accelerate.notebook.ranks.failing.incidents import IncidentKind, first_cause
from nb_accelerate.notebook.ranks.panel import RequestView, make_panel
from nb_accelerate.notebook.ranks.steering_buttons import steering_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nb_accelerate.notebook.display.frontend import FrontEnd
    from nb_accelerate.notebook.display.panel import Panel
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.pool.group import RankGroup
    from nb_accelerate.notebook.pool.namespace_sync import NamespaceSync
    from nb_accelerate.notebook.pool.options import CellOptions
    from nb_accelerate.notebook.pool.rank import PoolRank
    from nb_accelerate.notebook.pool.shipping import Ask
    from nb_accelerate.notebook.pool.source import CellSource
    from nb_accelerate.notebook.protocol.content import Numbers
    from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
    from nb_accelerate.notebook.ranks.output.sinks import Sink
    from nb_accelerate.notebook.ranks.request import Request
    from nb_accelerate.notebook.ranks.timeouts import Timeouts
    from nb_accelerate.notebook.worker.received import Key


class Cell:
    """A cell that is ready to run: the variables that ranks lack are packed. `begin` it, or `close` it.

    Args:
        syncs: which names of the notebook each rank has, by rank.
        ask: asks ranks which objects of the notebook they have changed.
        sink: where that is shown.
        in_background: whether nobody waits for it, so that its failure is said in the cell.

    Attributes:
        request: the request to the ranks.
        trained: models of the notebook that it has trained on the ranks, by name; known at its end.

    Raises:
        NameError: a name in ``options.send`` is not defined in the notebook.
        ShippingError: a value cannot be pickled; the text says which part.
        PoolError: a rank that should run it has ended.
    """

    def __init__(
        self,
        source: CellSource,
        options: CellOptions,
        group: RankGroup,
        syncs: Mapping[int, NamespaceSync],
        numbers: Numbers,
        ask: Ask,
        variables: Mapping[str, Any],
        output: RequestOutput,
        sink: Sink,
        *,
        in_background: bool,
    ) -> None:
        ranks = group.chosen(options.ranks)
        _check_names(options.send, variables)
        self._source = source
        self._options = options
        self._group = group
        self._output = output
        self._syncs = {rank.rank: syncs[rank.rank] for rank in ranks}
        self._variables = variables
        self.trained: dict[str, weakref.ref[Any]] = {}
        self._sent: dict[int, tuple[set[str], set[Key], set[Key]]] = {}
        limit = None if options.large else SIZE_LIMIT
        self._manifest = make_manifest(
            source.free, variables, self._syncs, numbers, ask, forced=options.send, limit=limit
        )
        try:
            self._say_what_is_not_sent()
            self._say_what_has_changed()
            self._say_what_is_sent_for_the_ranks_own()
            self.request = group.request(ranks, self._send, timeout=options.timeout, say=output.say)
            self.request.attended = self.request.is_raised = not in_background
            self.request.callbacks.append(self.close)
            if in_background:
                self.request.callbacks.append(lambda: tell_failure(self.request, output.say))
            front_end = "off" if options.quiet else choose_front_end(options.progress)
            with output.guard:
                interrupt = functools.partial(group.loop.interrupt, self.request)
                stop = Action("Interrupt", "raise KeyboardInterrupt on every rank; variables stay", interrupt)
                size = group.plan.num_processes
                steering = steering_actions(self.request, size, note=output.note, say=output.say)
                actions = (stop, *steering)
                self.request.panel = _panel(self.request, source.filename, group.plan, sink, actions, front_end)
        except BaseException:
            self.close()
            raise

    def begin(self, timeouts: Timeouts) -> None:
        """Ask the ranks to run it."""
        snapshots = self._manifest.snapshots
        for shipment in self._manifest.shipments:
            for rank in shipment.ranks:
                sync = self._syncs[rank]
                known, contents = sync.known.keys(), shipment.contents.keys()
                self._sent[rank] = {*shipment.values}, {*(contents - known)}, {*(contents & known)}
                sync.sent(shipment.values, snapshots, shipment.uses)
                sync.holds(shipment.contents, shipment.uses)
        snapshots.clear()  # they would keep what the notebook deletes meanwhile
        self._group.loop.begin(self.request, self._output, hangs=timeouts)

    def take_note(self) -> None:
        """Note, at its end, which names the ranks have bound and how many collectives they have seen."""
        ranks = self._group.ranks
        for number, end in self.request.cell_ends.items():
            sync = self._syncs[number]
            if not end.has_names and number in self._sent:
                names, new, changed = self._sent[number]
                sync.unbound(names)
                sync.gone(new)
                sync.doubt(changed)
            sync.gone(end.gone)
            sync.bound(end.bound, end.modules)
            sync.unbound(end.unbound)
            ranks[number].steps = end.steps
            for name in end.trained:
                if hasattr(type(self._variables.get(name)), "parameters"):
                    self.trained[name] = weakref.ref(self._variables[name])

    def close(self) -> None:
        """Close what was packed."""
        self._manifest.close()

    def _send(self, rank: PoolRank) -> None:
        source = self._source
        packed = self._manifest.packed_for(rank.rank)
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

    def _say_what_is_not_sent(self) -> None:
        """Say, once for each value and change of it, which names of the notebook the ranks have bound themselves."""
        own, syncs = self._manifest.own, self._syncs.values()
        news = [
            name
            for name, value in sorted(own.items())
            if not self._is_same_there(name, value) and (self._is_untold(name, value) or self._has_changed(name, syncs))
        ]
        for name in [name for name in news if name in RANK_NUMBERS]:
            self._output.say(
                f"on the ranks, {name} is the number that each rank has; what the notebook calls {name} was not sent "
                "to them. To send it, give it another name"
            )
        news = [name for name in news if name not in RANK_NUMBERS]
        if news:
            names = ", ".join(news)
            self._output.say(
                f"the ranks have their own {names}; what the notebook calls {names} was not sent to them. To send it: "
                f"%distributed push {' '.join(news)}"
            )

    def _is_same_there(self, name: str, value: object) -> bool:
        """Return whether a value of the notebook stands for what the ranks have: an import, or their type of device."""
        return (is_constant(value) and type(value) not in ATOMS) or (
            name == "device" and str(value).partition(":")[0] == self._group.plan.kind.name
        )

    def _has_changed(self, name: str, syncs: Iterable[NamespaceSync]) -> bool:
        """Return whether the notebook has changed, in place, a value of which the ranks have their own."""
        snapshot = self._manifest.snapshots.get(name)
        found = False
        for sync in syncs:
            if snapshot is not None and not sync.is_settled(name, snapshot):
                found |= sync.is_settled(name) or bool(sync.changed(name, snapshot, is_new=True))
                sync.settle(name, snapshot)
        return found

    def _say_what_has_changed(self) -> None:
        """Say which changes in the notebook meet changes on the ranks, are not seen, or replace what the ranks have."""
        manifest, say = self._manifest, self._output.say
        if manifest.conflicts:
            names = sorted(manifest.conflicts)
            for name, sync in itertools.product(names, self._syncs.values()):
                sync.settle(name, manifest.snapshots[name])
            say(
                f"{_were(names)} changed both in the notebook and on the ranks, which go on with theirs. To send the "
                f"notebook's: %distributed push {' '.join(names)}"
            )
        weights = sorted(manifest.weights - manifest.conflicts)
        if weights:
            say(f"{_were(weights)} changed in the notebook: its weights replace those of the ranks")
        if manifest.replacing:
            names = sorted(manifest.replacing)
            say(f"the notebook's new {', '.join(names)} replaces what the ranks had under that name and have changed")
        unread = [name for name, value in sorted(manifest.unread.items()) if self._is_untold(f"{name} unread", value)]
        if unread:
            say(
                f"{_were(unread)} not looked at for changes, because a part is too large or cannot be read. After a "
                f"change in place: %distributed push {' '.join(unread)}"
            )
        gone = manifest.deleted if self._source.free else ()  # to push is to send some names alone
        deleted = [name for name in sorted(gone) if self._is_untold(f"{name} deleted", True)]
        if deleted:
            say(f"{_were(deleted)} deleted in the notebook; the ranks still have theirs")

    def _is_untold(self, subject: str, value: object) -> bool:
        """Return whether a rank has not been told about yet."""
        return sum(sync.is_untold(subject, value) for sync in self._syncs.values()) > 0

    def _say_what_is_sent_for_the_ranks_own(self) -> None:
        """Say which names the ranks had bound themselves and have lost, so that they get the notebook's values now."""
        ranks: dict[str, set[int]] = {}
        for shipment in self._manifest.shipments:
            for name, value in shipment.values.items():
                if name not in self._options.send and not isinstance(value, ModuleType):
                    losers = [rank for rank in shipment.ranks if name in self._syncs[rank].lost]
                    ranks.setdefault(name, set()).update(losers)
        names = sorted(name for name, losers in ranks.items() if losers)
        if names:
            losers = sorted(set().union(*(ranks[name] for name in names)))
            whom = "the ranks" if len(losers) == len(self._syncs) else named(losers)
            self._output.say(
                f"the notebook's {', '.join(names)} {'was' if len(names) == 1 else 'were'} sent to {whom}, which no "
                f"longer {'has its' if whom.startswith('rank ') else 'have their'} own"
            )


def _were(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'was' if len(names) == 1 else 'were'}"


def _check_names(names: Sequence[str], variables: Mapping[str, Any]) -> None:
    for name in names:
        if name not in variables:
            raise NameError(f"name {name!r} is not defined in the notebook, so it cannot be sent to the ranks")


def _panel(
    request: Request,
    filename: str,
    plan: LaunchPlan,
    sink: Sink,
    actions: Sequence[Action],
    front_end: FrontEnd,
) -> Panel | None:
    numbers = [rank.rank for rank in request.ranks]
    for rank in request.ranks:
        rank.handle.page.want_rows(front_end != "off")
    name = (cell_name(filename) or "cell").replace("Cell In[", "cell ").rstrip("]")
    facts = facts_of(name, plan)
    if len(numbers) < plan.num_processes:
        facts = replace(facts, setup=(f"{label(numbers)} of {plan.num_processes}", *facts.setup[1:]))
    return make_panel(facts, numbers, sink, RequestView(request, actions), front_end)


def tell_failure(request: Request, say: Callable[[str], object]) -> None:
    """Say what went wrong in a cell in the background. Runs no code of users."""
    if request.incidents:
        cause = first_cause(request.incidents)
        hint = "" if cause.kind is IncidentKind.INTERRUPTED else "; .result() raises it here"
        say(said_of(cause, request).removesuffix(".") + hint)
