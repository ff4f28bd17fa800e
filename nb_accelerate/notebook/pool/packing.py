"""Pack what a plan sends to the ranks for a cell."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.notebook.pool.names import names_in
from nb_accelerate.notebook.pool.variables import Sent
from nb_accelerate.notebook.protocol.content import Snapshot
from nb_accelerate.notebook.protocol.main_module import Globals
from nb_accelerate.notebook.protocol.renewal import state_of
from nb_accelerate.notebook.protocol.shipping import References, pack
from nb_accelerate.notebook.worker.received import Names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.notebook.pool.plan import CellPlan, Delivery
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.worker.received import Key

_ADVICE = "Create it on the ranks, in a %%distributed cell."

SIZE_LIMIT = 1 << 30  # bytes that are sent unless the user asks for more


@dataclass
class Shipment:
    """Values for ranks that lack the same."""

    ranks: list[int]
    packed: Packed  # a `Names`, pickled; to be closed
    sent: dict[str, Sent]  # what is known of the values from then on, by name
    # Global names that functions among the values read, and those of containers that are referred to.
    uses: frozenset[str]
    contents: dict[Key, list[Any]]  # what objects hold on the ranks then
    deleted: frozenset[str]  # names that the ranks do not have any more then


def pack_plan(
    plan: CellPlan,
    changed_there: Callable[[Mapping[int, set[Key]]], set[Key]],
    limit: int | None,
    by_value: Sequence[ModuleType] = (),
) -> list[Shipment]:
    """Settle a plan with the ranks, and pack what it sends: at most one shipment for each rank, each to be closed."""
    while True:
        in_doubt = plan.in_doubt()
        plan.settle(changed_there(in_doubt) if in_doubt else set())
        with contextlib.ExitStack() as resources:
            shipments = []
            for delivery in plan.deliveries():
                shipments.append(_pack(delivery, plan, limit, by_value))
                resources.callback(shipments[-1].packed.close)
            # A pickle may reach functions that a plan does not see, in a `functools.partial`, say.
            more = plan.without_plan(set[str]().union(*(shipment.uses for shipment in shipments)))
            if not more:
                resources.pop_all()
                return shipments
        plan.add(more)


def _pack(delivery: Delivery, plan: CellPlan, limit: int | None, by_value: Sequence[ModuleType]) -> Shipment:
    sync, snapshots = plan.syncs[delivery.ranks[0]], plan.snapshots
    values = {name: plan.variables[name] for name in delivery.names}
    states: dict[Key, Any] = {}
    roots = {id(snapshot.value): name for name, snapshot in snapshots.items()}
    whole: set[Key] = set()
    for key, value in delivery.objects.items():
        state = state_of(value)
        if state is not None:
            states[key] = state
            continue
        whole.add(key)
        if id(value) in roots:
            values[roots[id(value)]] = value
        elif not plan.forced:
            name = next(name for name, snapshot in snapshots.items() if key in snapshot.objects)
            raise ShippingError(
                f"{name} holds a {type(value).__qualname__} that was changed in the notebook. It cannot be changed in "
                f"place on the ranks. To send all of it: %distributed push {name}"
            )
    containers = {address: name for address, name in sync.containers(plan.variables).items() if name not in values}
    parts = {key: tokens for name, snapshot in snapshots.items() for key, tokens in snapshot.parts(name).items()}
    # An object in a large list that was not looked at may have changed, so a copy is sent, and no reference.
    references = References(plan.object_ids, (sync.sent_tokens.keys() & parts.keys()) - whole, containers)
    try:
        packed = pack(
            Names(dict(sorted(values.items())), states, delivery.edits, sorted(delivery.deleted)),
            name="what the cell uses",
            parts={name: plan.variables[name] for name in (*values, *snapshots)},
            advice=_ADVICE,
            by_value=by_value,
            globals_there=Globals.OF_RECEIVER,
            limit=limit,
            references=references,
            refuses_graphs=True,
        )
    except TooLargeError as error:
        too_large = sorted(values or snapshots)
        raise TooLargeError(
            f"{', '.join(too_large)} of the notebook: {error.size / 2**30:.1f} GiB would be copied to the ranks. "
            f"To copy them: %distributed push {' '.join(too_large)} --large. Or load the data on the ranks "
            f"themselves, in a %%distributed cell",
            size=error.size,
        ) from None
    uses = packed.names.union(*(names_in(code) for code in packed.codes)) | sync.uses_of(references.used)
    uses |= {key for key in references.used if isinstance(key, str)}
    contents = {key: parts[key] for key in (*states, *(values.keys() & parts.keys()))}
    contents |= {key: edit.apply(sync.sent_tokens[key]) for key, edit in delivery.edits.items()}
    for object_id, value in references.packed.items():  # also what was not looked at, as it is in a large list
        contents[object_id] = parts.get(object_id) or Snapshot(value, plan.object_ids, deep=False).tokens
    # The values themselves are not kept: the notebook may delete them while the cell runs.
    sent = {name: Sent.of(name, value, snapshots.get(name), uses) for name, value in values.items()}
    return Shipment(delivery.ranks, packed, sent, uses, contents, frozenset(delivery.deleted))


def of_pulled(error: ShippingError, names: Sequence[str]) -> ShippingError:
    """Return the error of a rank about a value that was pulled, as one about the variable."""
    found = re.search(r"\[(\d+)\]", error.path)
    if found is None:
        return error
    path = f"{names[int(found[1])]}{error.path[found.end() :]}"
    return ShippingError(str(error).replace(error.path, path, 1), path=path, is_final=error.is_final)
