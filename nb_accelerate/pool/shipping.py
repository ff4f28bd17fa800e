"""Decides which values go to which rank before a cell, and packs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ShippingError, TooLargeError
from nb_accelerate.pool.names import names_in
from nb_accelerate.pool.namespace_sync import Verdict
from nb_accelerate.protocol.shipping import pack
from nb_accelerate.worker.namespace import is_hidden, push as define_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nb_accelerate.pool.namespace_sync import NamespaceSync
    from nb_accelerate.protocol.shipping import Packed

SIZE_LIMIT = 1 << 30
"""Bytes that are sent without being asked for."""


@dataclass
class Shipment:
    """Values on their way to ranks that need the same ones.

    Attributes:
        ranks: who gets it.
        packed: the values.
        values: by name.
        uses: global names that functions among the values read.
    """

    ranks: list[int]
    packed: Packed
    values: dict[str, Any]
    uses: frozenset[str]


@dataclass
class Manifest:
    """All shipments of one cell.

    Attributes:
        shipments: at most one for each rank.
        own: names that are the ranks' own, with what the notebook has under that name.
    """

    shipments: list[Shipment] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)

    def packed_for(self, rank: int) -> Packed | None:
        """What goes to a rank."""
        return next((one.packed for one in self.shipments if rank in one.ranks), None)

    def close(self) -> None:
        """Let go of the values: every rank has been sent its own."""
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
    """Pack what ranks lack.

    Args:
        free: names a cell reads.
        namespace: the notebook's.
        syncs: of the ranks that run the cell.
        forced: names to send in any case.
        limit: bytes.

    Raises:
        ShippingError: something cannot be pickled; says which part.
        TooLargeError: more than `limit` would be copied; says how to ask for it.
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
    """Find the names of `wanted`, and of what these read in turn, that the rank lacks; and those that are its own."""
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
    """Pack names, and what their functions read, until nothing is missing."""
    while True:
        values = {name: namespace[name] for name in sorted(need)}
        try:
            packed = pack(values, name="", into_main=True, limit=limit)
        except TooLargeError as error:
            names = ", ".join(values)
            raise TooLargeError(
                f"this cell uses {names} of the notebook: {error.size / 2**30:.1f} GiB would be copied to the ranks. "
                f"To copy them: %distributed push {' '.join(values)} --large. Or load the data on the ranks "
                f"themselves, in a %%distributed cell",
                size=error.size,
            ) from None
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
        large: they may be more than `SIZE_LIMIT`.

    Returns:
        The call, and the global names that functions among the values read.

    Raises:
        ShippingError: a value cannot be pickled; says which part.
        TooLargeError: they are too large.
    """
    try:
        packed = pack((define_names, (dict(values),), {}), into_main=True, limit=None if large else SIZE_LIMIT)
    except TooLargeError as error:
        raise TooLargeError(
            f"{', '.join(values)}: {error.size / 2**30:.1f} GiB would be copied to the ranks. To copy them: "
            f"%distributed push {' '.join(values)} --large",
            size=error.size,
        ) from None
    except ShippingError as error:
        part = error.path.partition("]['")[2]  # its path begins with our own tuple
        raise ShippingError(str(error).replace(error.path, f"['{part}"), path=f"['{part}") from error
    return packed, frozenset[str]().union(*(names_in(code) for code in packed.codes))
