"""Alarms break the connections of the rendezvous they are about, and of no other."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from nb_accelerate.notebook.protocol.messages import CutOff
from nb_accelerate.notebook.worker import alarm as module
from nb_accelerate.notebook.worker.alarm import Alarm

if TYPE_CHECKING:
    from collections.abc import Iterator

FELLOW = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'!'); s.recv(1)"


@pytest.fixture
def peer() -> Iterator[tuple[int, socket.socket]]:
    """Another process, and a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", FELLOW, str(server.getsockname()[1])])
        connection, _ = server.accept()
    with connection:
        assert connection.recv(1) == b"!"
        connection.settimeout(20)
        yield process.pid, connection
    process.wait(20)


def test_an_alarm_breaks_connections_of_its_meeting(peer: tuple[int, socket.socket]):
    pid, connection = peer
    alarm = Alarm(abort_groups=lambda: None)
    alarm.begin_rendezvous(3)
    assert alarm.answer(CutOff(rendezvous=3, peers=(pid,)))
    assert connection.recv(1) == b""


def test_an_alarm_that_comes_late_leaves_the_next_meeting_alone(peer: tuple[int, socket.socket]):
    pid, connection = peer
    alarm = Alarm(abort_groups=lambda: None)
    alarm.begin_rendezvous(3)
    alarm.begin_rendezvous(4)
    assert not alarm.answer(CutOff(rendezvous=3, peers=(pid,)))
    connection.settimeout(0.0)
    with pytest.raises(BlockingIOError):  # nothing has come, and nobody has closed it
        connection.recv(1)


def test_ranks_meet_again_only_when_an_alarm_has_been_answered(monkeypatch: pytest.MonkeyPatch):
    began, may_end = threading.Event(), threading.Event()

    def cut(*_: object) -> int:
        began.set()
        may_end.wait(20)
        return 0

    monkeypatch.setattr(module, "cut_connections", cut)
    alarm, met = Alarm(abort_groups=lambda: None), threading.Event()
    alarm.begin_rendezvous(1)
    answering = threading.Thread(target=alarm.answer, args=(CutOff(rendezvous=1, peers=()),))
    rendezvous = threading.Thread(target=lambda: (alarm.begin_rendezvous(2), met.set()))
    answering.start()
    assert began.wait(20)
    rendezvous.start()
    assert not met.is_set()
    may_end.set()
    for thread in (answering, rendezvous):
        thread.join(20)
    assert met.is_set()


def test_a_meeting_that_was_given_up_is_not_waited_for():
    alarm = Alarm(abort_groups=lambda: None)
    alarm.begin_rendezvous(1)
    assert not alarm.answer(CutOff(rendezvous=2, peers=()))
    with pytest.raises(ConnectionAbortedError, match="stopped waiting"):
        alarm.begin_rendezvous(2)
    alarm.begin_rendezvous(3)
