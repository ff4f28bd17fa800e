"""Agree at which address of the first machine the ranks of several machines meet, before any of them starts.

Ranks of all machines connect to one another in both directions, so that all of these are tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.remote.link import Link

LOOPBACK = "127.0.0.1"

_ADVICE = (
    "Ranks connect to one another in both directions. Open the firewalls between these machines for TCP, or choose "
    "another network: master_addr= with an address of the first machine, or GLOO_SOCKET_IFNAME in the environment there"
)


class Met(NamedTuple):
    """Where the first machine listens, and the interface of each machine on the way there."""

    address: str
    port: int
    interfaces: tuple[str, ...]


def addresses_to_try(links: Sequence[Link], known: str | None, check: Callable[[], object]) -> list[str]:
    """Return addresses of the first machine, those first that are the likeliest to be reached by the others.

    Args:
        known: the one that the engine knows.
    """
    first, *others = links
    if len({link.hello["network"] for link in links}) == 1 and first.hello["network"]:
        return [LOOPBACK]
    own = _outward(first)
    named = [address for address in own if own[address] == first.hello["variables"].get("GLOO_SOCKET_IFNAME")]
    theirs = [address for link in others for address in _outward(link)]
    routes = first.ask("routes", others=theirs, check=check)["addresses"]
    found = dict.fromkeys((*named, *filter(None, [known]), *(one for one in routes if one in own), *own))
    if not found:
        raise StartError(f"machine {first.name} has no network address that others could reach")
    return [*found]


def meet(links: Sequence[Link], addresses: Sequence[str], port: int, check: Callable[[], object]) -> Met:
    """Have the first machine listen at the first address that leads to all machines and back.

    Raises:
        StartError: there is none; the text says what was tried.
    """
    failures = []
    for address in addresses:
        try:
            met, own = _listening(links, address, port, check)
            for link, its_own in zip(links[1:], own, strict=True):
                _try_to_reach(link, its_own, links, check)
        except StartError as error:
            if any(link.lost for link in links):
                raise
            failures.append(str(error))
        else:
            return met
    raise StartError(f"{'. '.join(dict.fromkeys(failures))}. {_ADVICE}")


def meet_again(links: Sequence[Link], address: str, port: int, check: Callable[[], object]) -> Met:
    """Have the first machine listen at the address that was found before."""
    return _listening(links, address, port, check)[0]


def _listening(
    links: Sequence[Link], address: str, port: int, check: Callable[[], object]
) -> tuple[Met, tuple[str, ...]]:
    """Return where the first machine listens, and the addresses of the others on the way there."""
    first, *others = links
    listening = first.ask("listen", address=address, port=port, check=check)
    port = listening["port"]
    reached = [link.ask("reach", name=first.name, address=address, port=port, check=check) for link in others]
    interfaces = [one["interface"] for one in (listening, *reached)]
    return Met(address, port, tuple(interfaces)), tuple(one["own"] for one in reached)


def _try_to_reach(link: Link, address: str, links: Sequence[Link], check: Callable[[], object]) -> None:
    port = link.ask("listen", address=address, port=0, check=check)["port"]
    try:
        for other in links:
            if other is not link:
                other.ask("reach", name=link.name, address=address, port=port, check=check)
    finally:
        if not link.lost:
            link.ask("hush", check=check)


def _outward(link: Link) -> dict[str, str]:
    """Return the interfaces of a machine's addresses, without those that lead nowhere else."""
    addresses: dict[str, str] = link.hello["addresses"]
    return {address: name for address, name in addresses.items() if not address.startswith("127.")}
