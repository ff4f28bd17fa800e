"""Connections from hosts back to the kernel: who is taken, and what becomes of frames that somebody has changed."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.notebook.remote import connection_back
from nb_accelerate.notebook.remote.connection_back import CLAIM, Connection, KeyedSeal, Listener, connect
from nb_accelerate.notebook.remote.frames import FrameParser, FrameWriter, Kind, LinkError

HERE = "127.0.0.1"
KEY = bytes(range(32))


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener(HERE, num_machines=2)
    yield one
    one.close()
    for machine in one.connections:
        if machine.done():
            machine.result().socket.close()


def host_of(listener: Listener, machine: int, secret: bytes | None = None) -> Connection:
    return connect(HERE, listener.port, machine, secret or listener.secret, seconds=10)


def stranger_to(listener: Listener) -> tuple[socket.socket, bytes]:
    """A connection that has read the nonce of the kernel."""
    stranger = socket.create_connection((HERE, listener.port), timeout=10)
    return stranger, stranger.recv(32, socket.MSG_WAITALL)


def hears_the_end(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1000) == b""
    except ConnectionResetError:  # it had sent more than was read
        return True


def all_bytes(seal: KeyedSeal, *bodies: bytes) -> list[bytes]:
    writer = FrameWriter(seal)
    return [b"".join(writer.frame(Kind.STDOUT, 3, body)) for body in bodies]


def bodies_in(seal: KeyedSeal, *pieces: bytes) -> list[bytes]:
    parser = FrameParser(seal)
    for piece in pieces:
        parser.feed(piece)
    return [frame.body for frame in parser]


def test_a_host_that_knows_the_secret_is_taken_and_frames_go_both_ways(listener: Listener) -> None:
    with host_of(listener, 1).socket as there:
        taken = listener.connections[1].result(timeout=10)
        assert not listener.connections[0].done()
        assert taken.socket.getpeername() == there.getsockname()


def test_frames_of_both_sides_are_read_by_the_other(listener: Listener) -> None:
    with (there := host_of(listener, 0)).socket:
        here = listener.connections[0].result(timeout=10)
        for sends, receives in ((here, there), (there, here)):
            [data] = all_bytes(sends.seal, b"x" * 1000)
            sends.socket.send(data)
            assert bodies_in(receives.seal, receives.socket.recv(len(data), socket.MSG_WAITALL)) == [b"x" * 1000]


def test_nobody_listens_once_all_hosts_have_come(listener: Listener) -> None:
    with host_of(listener, 0).socket, host_of(listener, 1).socket:
        listener._thread.join(timeout=10)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HERE, listener.port))


def test_nobody_listens_after_closing_and_strangers_are_sent_away() -> None:
    listener = Listener(HERE, num_machines=1)
    stranger, _ = stranger_to(listener)
    listener.close()
    listener.close()
    with stranger:
        assert hears_the_end(stranger)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, listener.port))


def test_a_wrong_secret_is_refused_and_the_right_host_is_taken_after_it(listener: Listener) -> None:
    with pytest.raises(LinkError, match=r"machine 0: .*secret is"):
        host_of(listener, 0, secret=secrets.token_bytes(32))
    assert not listener.connections[0].done()
    with host_of(listener, 0).socket:
        assert listener.connections[0].result(timeout=10)
    assert listener.num_refused == 1


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 10, bytes(100_000), b"\xff" * CLAIM.size]
)
def test_bytes_of_a_stranger_do_nothing_and_few_are_read(listener: Listener, said: bytes) -> None:
    assert CLAIM.size <= 96
    stranger, _ = stranger_to(listener)
    with stranger:
        stranger.sendall(said)
        assert hears_the_end(stranger)
    with host_of(listener, 0).socket:
        assert listener.connections[0].result(timeout=10)
    assert not listener.connections[1].done()


def test_a_stranger_is_not_read_beyond_a_claim(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = listener._loop.sock_recv

    async def counted(connection: socket.socket, size: int) -> bytes:
        data = await receive(connection, size)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(listener._loop, "sock_recv", counted)
    stranger, _ = stranger_to(listener)
    with stranger:
        stranger.sendall(bytes(1000))
        assert hears_the_end(stranger)
    assert sum(sizes) == CLAIM.size


def test_strangers_that_say_nothing_do_not_hold_up_a_host(listener: Listener) -> None:
    silent = [socket.create_connection((HERE, listener.port)) for _ in range(connection_back._MAX_UNPROVED + 10)]
    with contextlib.ExitStack() as stack:
        for stranger in silent:
            stack.enter_context(stranger)
        stack.enter_context(host_of(listener, 0).socket)
        assert listener.connections[0].result(timeout=10)
        for oldest in silent[:11]:
            assert oldest.recv(32, socket.MSG_WAITALL) == b"" or hears_the_end(oldest)
        silent[-1].recv(32, socket.MSG_WAITALL)
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


def test_each_connection_has_a_new_nonce_and_a_recorded_claim_proves_nothing(listener: Listener) -> None:
    with _Recorder(listener.port) as recorder:
        connect(HERE, recorder.port, 0, listener.secret, seconds=10).socket.close()
        nonce, claim = recorder.heard.result(timeout=10)
    stranger, its_nonce = stranger_to(listener)
    with stranger:
        assert its_nonce != nonce
        stranger.sendall(claim.replace(CLAIM.pack(0, b"", b"")[:4], CLAIM.pack(1, b"", b"")[:4], 1))
        assert hears_the_end(stranger)
    again, _ = stranger_to(listener)
    with again:
        again.sendall(claim)
        assert hears_the_end(again)
    assert not listener.connections[1].done()


def test_a_recorded_claim_of_a_host_that_was_not_taken_proves_nothing_later(listener: Listener) -> None:
    with _Recorder(listener.port, passes_on=False) as recorder:
        with pytest.raises(LinkError, match="it hung up"):
            connect(HERE, recorder.port, 0, listener.secret, seconds=10)
        _, claim = recorder.heard.result(timeout=10)
    stranger, _ = stranger_to(listener)
    with stranger:
        stranger.sendall(claim)
        assert hears_the_end(stranger)
    assert not listener.connections[0].done()


def test_who_is_between_cannot_make_a_host_another_machine(listener: Listener) -> None:
    recorder = _Recorder(listener.port, alters=lambda claim: b"\0\0\0\1" + claim[4:])
    with recorder, pytest.raises(LinkError, match="did not take"):
        connect(HERE, recorder.port, 0, listener.secret, seconds=10)
    assert not any(machine.done() for machine in listener.connections)


def test_a_host_that_answers_twice_is_refused_and_the_first_connection_stays(listener: Listener) -> None:
    with (first := host_of(listener, 0)).socket:
        with pytest.raises(LinkError, match="machine had come before"):
            host_of(listener, 0)
        here = listener.connections[0].result(timeout=10)
        [data] = all_bytes(first.seal, b"still here")
        first.socket.send(data)
        assert bodies_in(here.seal, here.socket.recv(len(data), socket.MSG_WAITALL)) == [b"still here"]


def test_a_machine_that_was_not_asked_for_is_refused(listener: Listener) -> None:
    with pytest.raises(LinkError, match="as machine 2"):
        host_of(listener, 2)


def test_a_host_says_that_it_cannot_connect() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkError, match=rf"127\.0\.0\.1, port {port}: Connection refused"):
        connect(HERE, port, 0, KEY, seconds=10)


def test_a_host_does_not_take_a_stranger_for_the_kernel() -> None:
    """Not even one that sends back what it hears: a proof of a host is none of the kernel."""

    def reflect() -> None:
        connection, _ = server.accept()
        with connection:
            connection.send(bytes(32))
            claim = connection.recv(CLAIM.size, socket.MSG_WAITALL)
            connection.send(CLAIM.unpack(claim)[2])

    with socket.create_server((HERE, 0)) as server:
        thread = HelperThread(reflect, name="stranger")
        thread.start()
        with pytest.raises(LinkError, match="not the notebook"):
            connect(HERE, server.getsockname()[1], 0, KEY, seconds=10)
        thread.join()


def test_an_altered_frame_is_found_whichever_byte_it_is() -> None:
    [data] = all_bytes(KeyedSeal(KEY, is_host=True), b"weights")
    assert bodies_in(KeyedSeal(KEY, is_host=False), data) == [b"weights"]
    length = range(5, 13)  # another length: the frame may never be complete
    for place in (place for place in range(len(data)) if place not in length):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(LinkError, match="frame 0 to kernel"):
            bodies_in(KeyedSeal(KEY, is_host=False), bytes(altered))


def test_a_frame_that_was_made_shorter_is_found() -> None:
    [data] = all_bytes(KeyedSeal(KEY, is_host=True), b"w" * 100)
    altered = bytearray(data)
    altered[12] -= 1
    with pytest.raises(LinkError):
        bodies_in(KeyedSeal(KEY, is_host=False), bytes(altered))


@pytest.mark.parametrize("order", [[0, 0], [1], [1, 0], [0, 2]], ids=["repeated", "left out", "swapped", "gap"])
def test_frames_that_come_again_or_in_another_order_are_found(order: list[int]) -> None:
    frames = all_bytes(KeyedSeal(KEY, is_host=True), b"zero", b"one", b"two")
    with pytest.raises(LinkError):
        bodies_in(KeyedSeal(KEY, is_host=False), *(frames[number] for number in order))


def test_a_frame_that_comes_back_to_who_sent_it_is_found() -> None:
    kernel = KeyedSeal(KEY, is_host=False)
    frames = all_bytes(kernel, b"do this")
    with pytest.raises(LinkError):
        bodies_in(kernel, *frames)


def test_frames_of_an_earlier_connection_are_found() -> None:
    """Its host and machine are the same, and the secret too: the nonces are new."""
    seals = []
    for _ in range(2):
        listener = Listener(HERE, num_machines=1)
        listener.secret = KEY
        with (there := host_of(listener, 0)).socket, (here := listener.connections[0].result(timeout=10)).socket:
            seals.append((there.seal, here.seal))
        listener.close()
    frames = all_bytes(seals[0][0], b"from yesterday")
    with pytest.raises(LinkError):
        bodies_in(seals[1][1], *frames)


def test_the_address_towards_a_machine_is_that_of_the_interface_on_the_way() -> None:
    assert connection_back.address_towards("127.0.0.1") == "127.0.0.1"
    assert connection_back.address_towards("::1") == "::1"


class _Recorder:
    """Stands between a host and the kernel and keeps what they say until the proofs are done."""

    def __init__(
        self, port: int, *, passes_on: bool = True, alters: Callable[[bytes], bytes] = lambda claim: claim
    ) -> None:
        self.heard: Future[tuple[bytes, bytes]] = Future()
        self._to, self._passes_on, self._alters = port, passes_on, alters
        self._server = socket.create_server((HERE, 0))
        self.port = self._server.getsockname()[1]
        self._thread = HelperThread(self._run, name="recorder")

    def __enter__(self) -> _Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._server.close()

    def _run(self) -> None:
        host, _ = self._server.accept()
        with host, socket.create_connection((HERE, self._to)) as kernel:
            nonce = kernel.recv(32, socket.MSG_WAITALL)
            host.sendall(nonce)
            claim = host.recv(CLAIM.size, socket.MSG_WAITALL)
            if self._passes_on:
                kernel.sendall(self._alters(claim))
                host.sendall(kernel.recv(32, socket.MSG_WAITALL))
            self.heard.set_result((nonce, claim))
