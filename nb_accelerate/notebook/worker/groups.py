"""The process groups of this rank, seen without importing torch: most calls do not need to know more of them."""

from __future__ import annotations

import contextlib

from nb_accelerate.base.imported import imported


def has_group() -> bool:
    distributed = imported("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def collectives_of_groups() -> dict[str, int]:
    """Return how many collectives each process group has seen, by its name. Ranks in step have the same numbers."""
    if not has_group():
        return {}
    world = imported("torch.distributed").distributed_c10d._world  # noqa: SLF001 - there is no public list of groups
    found = {}
    for group, name in world.pg_names.items():
        with contextlib.suppress(Exception):  # a backend that does not count
            # The group itself would ask one of its backends, and only if that is one of torch's own.
            backends = {id(one): one for one in map(group._get_backend, group._device_types)}  # noqa: SLF001 - no public way
            found[name] = sum(one._get_sequence_number_for_group() for one in backends.values())  # noqa: SLF001 - as above
    return found
