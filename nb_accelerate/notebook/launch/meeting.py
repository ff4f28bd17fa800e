"""Agree at which address of the first machine the ranks of several machines meet, before any of them starts.

Ranks of all machines connect to one another in both directions, so that all of these are tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.remote.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOPBACK = "127.0.0.1"

_ADVICE = (
    "Ranks connect to one another in both directions. Open the firewalls between these machines for TCP, or choose "
    "another network: master_addr= with an address of the first machine, or GLOO_SOCKET_IFNAME in the environment there"
)


class Meeting(NamedTuple):
    """Where the first machine listens, and the interface of each machine on the way there."""

    address: str
    port: int
    interfaces: tuple[str, ...]
    ways_to_first: tuple[str, ...] = ()  # addresses of the other machines on the way to the first


def addresses_to_try(links: Sequence[Link], engines_address: str | None, check: Callable[[], object]) -> list[str]:
    """Return addresses of the first machine, those first that are the likeliest to be reached by the others."""
    first, *others = links
    if len({link.hello["network"] for link in links}) == 1 and first.hello["network"]:
        return [LOOPBACK]
    interfaces = _outward(first)
    gloo_interface = first.hello["variables"].get("GLOO_SOCKET_IFNAME")
    ordered = [address for address, interface in interfaces.items() if interface == gloo_interface]
    if engines_address:
        ordered.append(engines_address)
    others_addresses = [address for link in others for address in _outward(link)]
    routes = first.ask("routes", others=others_addresses, check=check)["addresses"]
    ordered += [address for address in routes if address in interfaces]
    ordered += interfaces
    if not ordered:
        raise StartError(f"machine {first.name} has no network address that others could reach")
    return [*dict.fromkeys(ordered)]


def agree(links: Sequence[Link], addresses: Sequence[str], port: int, check: Callable[[], object]) -> Meeting:
    """Have the first machine listen at the first address that leads to all machines and back.

    Raises:
        StartError: there is none; the text says what was tried.
    """
    failures = []
    for address in addresses:
        try:
            meeting = listening(links, address, port, check)
            _try_all_others(links, meeting.ways_to_first, check)
        except StartError as error:
            if any(link.lost for link in links):
                raise
            failures.append(str(error))
        else:
            return meeting
    raise StartError(f"{'. '.join(dict.fromkeys(failures))}. {_ADVICE}")


def broken_way(links: Sequence[Link], meeting: Meeting) -> str:
    """Return which machine no longer reaches another one, while ranks run there; "" if each reaches all others."""
    try:
        _reached(links, meeting.address, meeting.port, lambda: None)
        _try_all_others(links, meeting.ways_to_first, lambda: None)
    except StartError as error:
        return str(error)
    return ""


def listening(links: Sequence[Link], address: str, port: int, check: Callable[[], object]) -> Meeting:
    """Have the first machine listen, and the others reach it."""
    first = links[0].ask("listen", address=address, port=port, check=check)
    reached = _reached(links, address, first["port"], check)
    interfaces = tuple(way["interface"] for way in (first, *reached))
    return Meeting(address, first["port"], interfaces, tuple(way["own"] for way in reached))


def _reached(links: Sequence[Link], address: str, port: int, check: Callable[[], object]) -> list[dict[str, str]]:
    first, *others = links
    targets = [(first.name, address, port)]
    answers = Link.ask_all([(link, "reach", {"targets": targets}) for link in others], check=check)
    return [answer["ways"][0] for answer in answers]


def _try_all_others(links: Sequence[Link], ways: Sequence[str], check: Callable[[], object]) -> None:
    """Have all machines but the first listen, at the addresses `ways`, and each try all others at once."""
    others = links[1:]
    try:
        listen = [(link, "listen", {"address": way, "port": 0}) for link, way in zip(others, ways, strict=True)]
        ports = [answer["port"] for answer in Link.ask_all(listen, check=check)]
        targets = [(link.name, way, port) for link, way, port in zip(others, ways, ports, strict=True)]
        tries = [(link, [to for other, to in zip(others, targets, strict=True) if other is not link]) for link in links]
        Link.ask_all([(link, "reach", {"targets": targets}) for link, targets in tries if targets], check=check)
    finally:
        Link.ask_all([(link, "hush", {}) for link in others if not link.lost], check=check)


def _outward(link: Link) -> dict[str, str]:
    """Return the interfaces of a machine's addresses, without loopback."""
    addresses: dict[str, str] = link.hello["addresses"]
    return {address: name for address, name in addresses.items() if not address.startswith("127.") and address != "::1"}
