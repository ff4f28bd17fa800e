"""Decide which values are sent to which rank before a cell, and pack them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.pool.code_names import names_in
from nb_accelerate.pool.namespace_sync import Verdict
from nb_accelerate.protocol.shipping import pack
from nb_accelerate.worker.namespace import is_hidden, push as define_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nb_accelerate.pool.namespace_sync import NamespaceSync
    from nb_accelerate.protocol.shipping import Packed

_ADVICE = "Create it on the ranks, in a %%distributed cell."

SIZE_LIMIT = 1 << 30
"""Bytes that are sent unless the user asks for more."""


@dataclass
class Shipment:
    """Values for ranks that lack the same names.

    Attributes:
        ranks: the ranks that get them.
        packed: the values, pickled.
        values: the values, by name.
        uses: global names that functions among the values read.
    """

    ranks: list[int]
    packed: Packed
    values: dict[str, Any]
    uses: frozenset[str]


@dataclass
class Manifest:
    """All values that are sent for one cell.

    Attributes:
        shipments: at most one for each rank.
        own: names that cells on the ranks have bound, and that are therefore not sent, with the notebook's values.
    """

    shipments: list[Shipment] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)

    def packed_for(self, rank: int) -> Packed | None:
        """Return what a rank gets, or None."""
        return next((one.packed for one in self.shipments if rank in one.ranks), None)

    def close(self) -> None:
        """Close what was packed, and forget the values."""
        for shipment in self.shipments:
            shipment.packed.close()
        self.shipments.clear()
        self.own.clear()


def make_manifest(
    free: Iterable[str],
    namespace: Mapping[str, Any],
    syncs: Mapping[int, NamespaceSync],
    *,
    forced: Iterable[str] = (),
    limit: int | None = SIZE_LIMIT,
) -> Manifest:
    """Pack the values that ranks lack.

    Args:
        free: names that the cell reads.
        namespace: variables of the notebook.
        syncs: what each rank that runs the cell has, by rank.
        forced: names to send in any case.
        limit: bytes that may be sent; None for any number.

    Raises:
        ShippingError: a value cannot be pickled; the text says which part.
        TooLargeError: the values have more than `limit` bytes; the text says how to send them nevertheless.
    """
    manifest = Manifest()
    by_need: dict[frozenset[str], Shipment] = {}
    try:
        for rank, sync in syncs.items():
            need, own = _need(set(free) | set(forced), namespace, sync, set(forced))
            manifest.own.update((name, namespace[name]) for name in own)
            if not need:
                continue
            key = frozenset(need)
            if key not in by_need:
                by_need[key] = _pack(need, namespace, sync, set(forced), limit)
                manifest.shipments.append(by_need[key])
            by_need[key].ranks.append(rank)
    except BaseException:
        manifest.close()
        raise
    return manifest


def _need(
    wanted: set[str], namespace: Mapping[str, Any], sync: NamespaceSync, forced: set[str]
) -> tuple[set[str], set[str]]:
    """Return which of the wanted names, and of those that their values read, a rank lacks, and which are its own."""
    need: set[str] = set()
    own: set[str] = set()
    seen: set[str] = set()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in namespace or is_hidden(name):
            continue
        seen.add(name)
        verdict = Verdict.SEND if name in forced else sync.judge(name, namespace[name])
        if verdict is Verdict.SEND:
            need.add(name)
        elif verdict is Verdict.OWN:
            own.add(name)
        waiting.extend(sync.uses(name))
    return need, own


def _pack(
    need: set[str], namespace: Mapping[str, Any], sync: NamespaceSync, forced: set[str], limit: int | None
) -> Shipment:
    """Pack the values of names, and of the names that functions among them read, until nothing is missing."""
    while True:
        values = {name: namespace[name] for name in sorted(need)}
        try:
            packed = pack(values, name="what the cell uses", advice=_ADVICE, into_main=True, limit=limit)
        except TooLargeError as error:
            names = ", ".join(values)
            raise TooLargeError(
                f"this cell uses {names} of the notebook: {error.size / 2**30:.1f} GiB would be copied to the ranks. "
                f"To copy them: %distributed push {' '.join(values)} --large. Or load the data on the ranks "
                f"themselves, in a %%distributed cell",
                size=error.size,
            ) from None
        except ShippingError as error:
            raise _of_a_variable(error) from error.__cause__
        uses: frozenset[str] = frozenset().union(*(names_in(code) for code in packed.codes))
        more, _ = _need(set(uses), namespace, sync, forced)
        if more <= need:
            return Shipment(ranks=[], packed=packed, values=values, uses=uses)
        packed.close()
        need = need | more


def pack_to_push(values: Mapping[str, Any], *, large: bool) -> tuple[Packed, frozenset[str]]:
    """Pack a call that defines names on a rank.

    Args:
        values: by name.
        large: whether they may have more than `SIZE_LIMIT` bytes.

    Returns:
        The call, and the global names that functions among the values read.

    Raises:
        ShippingError: a value cannot be pickled; the text says which part.
        TooLargeError: they have more than `SIZE_LIMIT` bytes, and `large` is False.
    """
    try:
        call: tuple[Any, ...] = (define_names, (dict(values),), {})
        packed = pack(call, advice=_ADVICE, into_main=True, limit=None if large else SIZE_LIMIT)
    except TooLargeError as error:
        raise TooLargeError(
            f"{', '.join(values)}: {error.size / 2**30:.1f} GiB would be copied to the ranks. To copy them: "
            f"%distributed push {' '.join(values)} --large",
            size=error.size,
        ) from None
    except ShippingError as error:
        raise _of_a_variable(error) from error.__cause__
    return packed, frozenset[str]().union(*(names_in(code) for code in packed.codes))


def _of_a_variable(error: ShippingError) -> ShippingError:
    """Return an error about a part of a dictionary of variables, told as a part of the variable."""
    _, bracket, key = error.path.partition("['")  # what is before it is ours
    name, _, part = key.partition("']")
    path = f"{name}{part}" if bracket else error.path
    return ShippingError(str(error).replace(error.path, path, 1), path=path, is_final=error.is_final)


def of_pulled(error: ShippingError, names: Sequence[str]) -> ShippingError:
    """Return the error of a rank about a value that was pulled, told as one about the variable.

    Args:
        error: about a part of the list that the rank was to return.
        names: of the variables in that list.
    """
    place = re.search(r"\[(\d+)\]", error.path)
    if place is None:
        return error
    path = f"{names[int(place[1])]}{error.path[place.end() :]}"
    return ShippingError(str(error).replace(error.path, path, 1), path=path, is_final=error.is_final)
