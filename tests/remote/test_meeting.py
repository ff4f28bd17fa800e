"""Which address of the first machine is tried first for ranks to meet at. Connections: `test_two_networks`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.meeting import addresses_to_try

if TYPE_CHECKING:
    from nb_accelerate.notebook.remote.link import Link

DOCKER = "172.17.0.1"


def machine(name: str, addresses: dict[str, str], *, routes: list[str] | None = None, gloo: str = "") -> Link:
    hello = {
        "network": name,
        "addresses": {"127.0.0.1": "lo", **addresses},
        "variables": {"GLOO_SOCKET_IFNAME": gloo} if gloo else {},
    }

    def ask(what: str, *, others: list[str], check: object) -> dict[str, list[str]]:
        assert (what, others) == ("routes", ["10.0.0.2", DOCKER])
        return {"addresses": routes or []}

    return cast("Link", SimpleNamespace(name=name, hello=hello, ask=ask))


SECOND = machine("b", {"10.0.0.2": "eth0", DOCKER: "docker0"})
ADDRESSES = {"192.168.7.1": "wlan0", "10.0.0.1": "eth0", DOCKER: "docker0"}


@pytest.mark.parametrize(
    ("gloo", "known", "order"),
    [
        ("", None, ["10.0.0.1", "192.168.7.1", DOCKER]),
        ("wlan0", None, ["192.168.7.1", "10.0.0.1", DOCKER]),
        ("", "10.5.5.5", ["10.5.5.5", "10.0.0.1", "192.168.7.1", DOCKER]),
    ],
)
def test_the_route_to_other_machines_comes_before_other_addresses(
    gloo: str, known: str | None, order: list[str]
) -> None:
    first = machine("a", ADDRESSES, routes=["10.0.0.1"], gloo=gloo)
    assert addresses_to_try([first, SECOND], known, lambda: None) == order


def test_machines_that_are_one_meet_on_the_loopback_interface() -> None:
    first = machine("a", ADDRESSES)
    assert addresses_to_try([first, first], None, lambda: None) == ["127.0.0.1"]


def test_a_machine_without_a_network_is_named() -> None:
    with pytest.raises(StartError, match="no network address"):
        addresses_to_try([machine("a", {}), SECOND], None, lambda: None)
