"""What the launchers of several machines tell one another, over loopback."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import pytest

from nb_accelerate.errors import ConfigError
from nb_accelerate.launch.machine_state import DONE, Machine, NotALaunchError, no_first_machine, not_all_came
from nb_accelerate.launch.machines import Machines

LIMIT = 10.0
"""Seconds that a test waits for something that is heard at once."""


def soon() -> float:
    return time.monotonic() + LIMIT


@pytest.fixture
def first() -> Iterator[Machines]:
    """The first machine, which the others connect to."""
    listener = socket.create_server(("127.0.0.1", 0))
    machines = Machines.serve(listener, "127.0.0.1", node_rank=0)
    machines.port = listener.getsockname()[1]  # type: ignore[attr-defined]
    yield machines
    machines.close()


@pytest.fixture
def come(first: Machines) -> Iterator[Callable[..., Machines]]:
    """Make another machine come."""
    others: list[Machines] = []

    def connect(**facts: object) -> Machines:
        others.append(Machines.connect(("127.0.0.1", first.port), "127.0.0.2", soon(), **facts))  # type: ignore[attr-defined]
        return others[-1]

    yield connect
    for other in others:
        other.close()


def test_every_machine_knows_all_others(first: Machines, come: Callable[..., Machines]) -> None:
    second, third = come(node_rank=1), come(node_rank=2)
    assert all(one.wait_for(lambda one=one: len(one.here) == 3, soon()) for one in (first, second, third))
    assert [one.node_rank for one in second.here] == [0, 1, 2]
    assert third.here[1].address == "127.0.0.2"


def test_a_failure_is_told_to_all_that_take_part(first: Machines, come: Callable[..., Machines]) -> None:
    second, third = come(node_rank=1), come(node_rank=2)
    for one in (first, second):
        one.join("round")
    second.fail("rank 1 failed: ValueError: not today")
    assert first.wait_for(lambda: first.trouble("round") is not None, soon())
    trouble = first.trouble("round")
    assert str(trouble).startswith("on the machine at 127.0.0.2")
    assert str(trouble).endswith(", rank 1 failed: ValueError: not today")
    assert trouble is not None
    assert trouble.address == "127.0.0.2"
    assert third.wait_for(lambda: third.all[1].failed != "", soon())
    assert first.trouble("another round") is None


def test_a_launch_that_was_killed_is_noticed_and_one_that_is_done_is_no_trouble(
    first: Machines, come: Callable[..., Machines]
) -> None:
    second, third = come(node_rank=1), come(node_rank=2)
    for one in (first, second, third):
        one.join("round")
    second.ends_as = DONE
    second.close()
    assert first.wait_for(lambda: first.all[1].ended == DONE, soon())
    assert first.trouble("round") is None
    # What the system does for a process that was killed. close() alone ends no connection that a thread waits for.
    third._peers[0].link._socket.shutdown(socket.SHUT_RDWR)
    assert first.wait_for(lambda: first.trouble("round") is not None, soon())
    assert "was killed, or that machine has gone down" in str(first.trouble("round"))


def test_the_last_line_of_a_machine_is_read_also_if_something_is_written_to_it_first(first: Machines) -> None:
    other = socket.create_connection(("127.0.0.1", first.port))  # type: ignore[attr-defined]
    machine = Machine(number=-1, address="127.0.0.2", host="other", node_rank=1)

    def say(**facts: object) -> None:
        other.sendall(json.dumps({"me": asdict(replace(machine, **facts)), "rows": []}).encode() + b"\n")  # type: ignore[arg-type]

    say()
    assert first.wait_for(lambda: len(first.all) == 2, soon())
    assert select.select([other], [], [], LIMIT)[0]  # what it does not read resets the connection
    with first._changed:  # its thread waits
        say(ended=DONE)
        other.close()
        first._beat()
    assert first.all[1].ended == DONE
    assert first.all[1].lost == ""


def test_silence_is_noticed(first: Machines, come: Callable[..., Machines]) -> None:
    second = come(node_rank=1)
    for one in (first, second):
        one.join("round")
    assert first.wait_for(lambda: first.all[1].round_id == "round", soon())
    first.silence_limit = 0.0  # whatever was heard is too long ago
    assert first.wait_for(lambda: first.trouble("round") is not None, soon())
    assert "has not been heard of for 0 s" in str(first.trouble("round"))
    first.silence_limit = LIMIT
    assert first.wait_for(lambda: first.trouble("round") is None, soon())  # it is heard again


def test_a_first_machine_that_falls_silent_ends_what_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        table = [asdict(Machine(number=0, address="127.0.0.1", host="first", round_id="round"))]
        says = threading.Thread(target=_speak_once, args=(listener, {"you": 1, "table": table, "regroup": ""}))
        says.start()
        second = Machines.connect(listener.getsockname(), "127.0.0.2", soon(), node_rank=1)
        try:
            second.silence_limit = 0.0
            began = time.monotonic()
            assert second.wait_for(lambda: second.trouble("round") is not None, began + LIMIT)
            assert time.monotonic() < began + LIMIT, "nothing has woken it: it looked again when its time was over"
        finally:
            second.close()
            says.join()


def _speak_once(listener: socket.socket, line: dict[str, object]) -> None:
    """Be a machine that says one line and nothing after it, until the other one goes."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(json.dumps(line).encode() + b"\n")
        while connection.recv(1 << 16):
            pass


def test_machines_of_another_launch_are_refused(first: Machines, come: Callable[..., Machines]) -> None:
    come(node_rank=1)
    with pytest.raises(ConfigError, match=r"machine 1 has come already: it is the one at 127\.0\.0\.2"):
        come(node_rank=1)
    with pytest.raises(ConfigError, match=r"would start 2 ranks, but the one at .* starts 1"):
        come(node_rank=2, num_processes=2)
    with pytest.raises(ConfigError, match=r"was started for 3 machines, but the one at .* for 1\. Start the same"):
        come(node_rank=2, num_nodes="3")
    assert first.refused[-1].startswith("The one at 127.0.0.2")
    assert "2 of 3 machines came to place within 1 s; number 2 is missing. The one at 127.0.0.2" in str(
        not_all_came(first.all, 3, "place", 1, first.refused[-1:])
    )


def test_why_ranks_failed_is_known_until_the_next_rendezvous(first: Machines, come: Callable[..., Machines]) -> None:
    second = come(node_rank=1)
    for one in (first, second):
        one.join("round")
    second.fail("rank 1 was killed")
    second.wait_for_round()
    # Both are told: a machine that has just come waits too.
    assert first.wait_for(lambda: first.all[1].is_waiting and first.all[1].round_id == "round", soon())
    assert "rank 1 was killed" in str(first.trouble("round"))
    second.join("another round")
    assert first.wait_for(lambda: first.trouble("round") is None, soon())


def test_rows_of_ranks_come_to_the_first_machine(first: Machines, come: Callable[..., Machines]) -> None:
    second = come(node_rank=1)
    second.tell_rows(lambda: [{"rank": 1, "state": "running"}])
    assert first.wait_for(lambda: first.rows_of_others() == [{"rank": 1, "state": "running"}], soon())


def test_ranks_whose_pages_are_closed_are_not_looked_at_any_more(come: Callable[..., Machines]) -> None:
    second = come(node_rank=1)
    events, is_asked, goes_on = [], threading.Event(), threading.Event()

    def rows() -> list[dict[str, object]]:
        is_asked.set()
        goes_on.wait(LIMIT)
        events.append("looked")
        return []

    second.tell_rows(rows)
    assert is_asked.wait(LIMIT)
    threading.Timer(0.05, goes_on.set).start()
    second.tell_rows(None)
    events.append("closed")
    assert events == ["looked", "closed"]


@pytest.mark.parametrize("line", [b"GET / HTTP/1.0\r\n\r\n", b"[" * 60_000 + b"\n"], ids=["no JSON", "too deep"])
def test_what_is_no_launch_is_not_let_in(first: Machines, come: Callable[..., Machines], line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", first.port)) as stranger:  # type: ignore[attr-defined]
        stranger.sendall(line)
        assert stranger.recv(100) == b""
    assert len(first.all) == 1
    come(node_rank=1)


def test_sentences_name_who_is_missing() -> None:
    here = Machine(number=0, address="10.0.0.1", node_rank=0)
    gone = Machine(number=1, address="10.0.0.2", host="two", node_rank=2, lost="was killed")
    text = str(not_all_came([here, gone], 3, "10.0.0.1:29500", 60))
    assert text.startswith(
        "1 of 3 machines came to 10.0.0.1:29500 within 60 s; number 1 and number 2, last seen at 10.0.0"
    )
    unnumbered = [Machine(number=one.number, address=one.address, lost=one.lost) for one in (here, gone)]
    assert "the one at 10.0.0.2 is missing" in str(not_all_came(unnumbered, 2, "10.0.0.1:29400", 60))
    assert "here is 10.0.0.1" in str(not_all_came(unnumbered[:1], 2, "10.0.0.1:29400", 60))
    stranger = NotALaunchError("is no launch of this package, or one that has ended")
    assert str(no_first_machine("10.0.0.1:29500", 600, stranger)).startswith(
        "what listens at 10.0.0.1:29500, the address of the first machine, is no launch of this package, or one that "
    )
    assert "did not answer within 5 s (No route to host)" in str(
        no_first_machine("10.0.0.1:29500", 5, OSError(113, "No route to host"))
    )
