"""A connection from the host of a machine back to the kernel, for engines that give no stream of their own.

::

    kernel                                              host
      | <------------------ connects ------------------- |
      | --- nonce (32 bytes) --------------------------> |
      | <-- number of the machine (4), nonce, proof ---- |    `CLAIM`: all that is read before the proof
      | --- proof -------------------------------------> |
      | <================= sealed frames ==============> |

A proof is a checksum over both nonces and the number, whose key is the secret of the run. The secret reaches hosts by
the channel of the engine, and never this connection. Each connection has new nonces, so that a recording of one
connection proves nothing in another one. Frames are not encrypted, but sealed: each has a checksum whose key both sides
have made of the secret and the nonces (BLAKE2b in its keyed mode, https://www.rfc-editor.org/rfc/rfc7693).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import socket
import struct
from concurrent.futures import Future
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.notebook.remote.frames import LinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.remote.frames import Bytes

NONCE_SIZE: Final = 32  # bytes of a secret, of a nonce and of a proof

CLAIM: Final = struct.Struct("!I32s32s")  # what a host says of itself: the number of its machine, its nonce, its proof

# What a checksum is for, so that none can stand for another one.
_HOST_PROOF, _KERNEL_PROOF, _KEY = b"proof of host", b"proof of kernel", b"key of frames"
_TO_KERNEL, _TO_HOST = b"to kernel", b"to host"

_MAX_UNPROVED = 64  # Connections that are open at a time without a proof, at most. For one more the oldest is closed.


class KeyedSeal:
    """The seal of a stream, whose tags cover the direction, the number of a frame in it, and its bytes.

    So a frame that was altered, left out, repeated, moved, or sent back to where it came from is found.

    Args:
        key: which both sides have, and nobody else.
    """

    size = 32

    def __init__(self, key: bytes, *, is_host: bool) -> None:
        self._key = key
        self._sends, self._receives = (_TO_KERNEL, _TO_HOST) if is_host else (_TO_HOST, _TO_KERNEL)
        self._num_sent = self._num_received = 0

    def tag(self, data: Sequence[Bytes]) -> bytes:
        """Return the tag of the next frame that is sent."""
        tag = self._checksum(self._sends, self._num_sent, data)
        self._num_sent += 1
        return tag

    def check(self, data: Sequence[Bytes], tag: bytes) -> None:
        """Check the tag of the next frame that has come. Raises LinkError if it is another one."""
        if not hmac.compare_digest(self._checksum(self._receives, self._num_received, data), tag):
            raise LinkError(
                f"frame {self._num_received} {self._receives.decode()} is not the one that was sent: something between "
                "the kernel and this machine has changed it"
            )
        self._num_received += 1

    def _checksum(self, direction: bytes, number: int, data: Sequence[Bytes]) -> bytes:
        checksum = blake2b(number.to_bytes(8, "big"), key=self._key, person=direction, digest_size=self.size)
        for part in data:
            checksum.update(part)
        return checksum.digest()


class Connection(NamedTuple):
    """A connection whose sides have proved to each other that they know the secret."""

    socket: socket.socket
    seal: KeyedSeal


class Listener:
    """Accepts one connection of each host of a run, and nothing else; closed once all hosts have come.

    Args:
        address: that hosts can reach; see `address_towards`.

    Attributes:
        secret: of this run, which hosts have to be told.
        connections: for each machine the connection of its host, once it has come.
        num_refused: connections that ended without a proof, had a wrong one, or were of a host that had come before.
    """

    def __init__(self, address: str, num_machines: int) -> None:
        self.secret = secrets.token_bytes(NONCE_SIZE)
        self.connections: list[Future[Connection]] = [Future() for _ in range(num_machines)]
        self.num_refused = 0
        self._server = socket.create_server((address, 0), family=family_of(address))
        self._server.setblocking(False)
        self.address: str = address
        self.port: int = self._server.getsockname()[1]
        # A loop, and not one connection after the other: who connects and says nothing must not keep a host waiting.
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._unproved: list[asyncio.Task[bool]] = []  # in the order in which they came
        self._thread = HelperThread(self._run, name="connections-back", on_failure=self._fail)
        self._thread.start()

    def close(self) -> None:
        """Listen no more. The connections that have come stay. Can be repeated."""
        with contextlib.suppress(RuntimeError):  # all hosts have come: the loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _run(self) -> None:
        with self._server, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._accept_until_closed())

    def _fail(self, _: str, error: BaseException) -> None:
        for connection in self.connections:  # somebody waits for each, and would wait for ever
            if not connection.done():
                connection.set_exception(error)

    async def _accept_until_closed(self) -> None:
        accepting, closing = (asyncio.create_task(waits) for waits in (self._accept(), self._closing.wait()))
        await asyncio.wait((accepting, closing), return_when=asyncio.FIRST_COMPLETED)
        tasks = (accepting, closing, *self._unproved)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if not accepting.cancelled():
            accepting.result()  # raises the error by which it has ended, which `_fail` is called with

    async def _accept(self) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(self._server)
            if len(self._unproved) == _MAX_UNPROVED:
                # The oldest goes, and not the new one: else strangers that hold connections open would lock out the
                # hosts.
                self._unproved.pop(0).cancel()
            task = asyncio.create_task(self._prove(connection))
            task.add_done_callback(functools.partial(self._keep_or_refuse, connection))
            self._unproved.append(task)

    def _keep_or_refuse(self, connection: socket.socket, task: asyncio.Task[bool]) -> None:
        if task in self._unproved:
            self._unproved.remove(task)
        if task.cancelled() or not task.result():
            connection.close()
            self.num_refused += 1
        elif all(future.done() for future in self.connections):
            self._closing.set()

    async def _prove(self, connection: socket.socket) -> bool:
        """Return whether a connection is of a host that has not come before."""
        connection.setblocking(False)
        nonce, claim = secrets.token_bytes(NONCE_SIZE), b""
        try:
            await self._loop.sock_sendall(connection, nonce)
            while len(claim) < CLAIM.size:
                received = await self._loop.sock_recv(connection, CLAIM.size - len(claim))
                if not received:
                    return False
                claim += received
            machine, hosts_nonce, proof = CLAIM.unpack(claim)
            proofs = _Proofs(self.secret, nonce, hosts_nonce, machine)
            is_awaited = machine < len(self.connections) and not self.connections[machine].done()
            if not proofs.proves(_HOST_PROOF, proof) or not is_awaited:
                return False
            # Nothing is awaited between this check and the result, or two connections of one host might pass it.
            connection.send(proofs.checksum(_KERNEL_PROOF))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            return False
        self.connections[machine].set_result(Connection(connection, proofs.seal(is_host=False)))
        return True


def connect(address: str, port: int, machine: int, secret: bytes, *, seconds: float) -> Connection:
    """Connect the host of a machine to the kernel.

    Args:
        machine: its number.
        seconds: after which no answer is awaited any more.

    Returns:
        A blocking socket without a timeout, and its seal.

    Raises:
        LinkError: nothing can be reached there, it is not the kernel, or it does not take this host.
    """
    notebook = f"the notebook at {address}, port {port}"
    try:
        connection = socket.create_connection((address, port), timeout=seconds)
    except OSError as error:
        raise LinkError(
            f"{socket.gethostname()} cannot connect to {notebook}: {error.strerror or error}. See that no firewall is "
            "between them"
        ) from None
    try:
        seal = _prove_to(connection, machine, secret)
    except (OSError, EOFError) as error:
        connection.close()
        raise LinkError(
            f"{notebook}, did not take {socket.gethostname()} as machine {machine}: {str(error) or 'it hung up'}. The "
            "secret is of another run, or a host of this machine had come before"
        ) from None
    except LinkError:
        connection.close()
        raise
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connection, seal)


def _prove_to(connection: socket.socket, machine: int, secret: bytes) -> KeyedSeal:
    kernels_nonce, nonce = _receive(connection, NONCE_SIZE), secrets.token_bytes(NONCE_SIZE)
    proofs = _Proofs(secret, kernels_nonce, nonce, machine)
    connection.sendall(CLAIM.pack(machine, nonce, proofs.checksum(_HOST_PROOF)))
    if not proofs.proves(_KERNEL_PROOF, _receive(connection, NONCE_SIZE)):
        raise LinkError("what answers there does not know the secret of this run: it is not the notebook")
    return proofs.seal(is_host=True)


class _Proofs(NamedTuple):
    """What both sides of one connection know once the claim is read, and somebody who listens does not: the secret."""

    secret: bytes
    nonce_of_kernel: bytes
    nonce_of_host: bytes
    machine: int

    def checksum(self, purpose: bytes) -> bytes:
        data = self.nonce_of_kernel + self.nonce_of_host + self.machine.to_bytes(4, "big")
        return blake2b(data, key=self.secret, person=purpose, digest_size=NONCE_SIZE).digest()

    def proves(self, purpose: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(self.checksum(purpose), proof)

    def seal(self, *, is_host: bool) -> KeyedSeal:
        return KeyedSeal(self.checksum(_KEY), is_host=is_host)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_towards(other: str) -> str:
    """Return the address of this machine that another one can answer to: of the interface on the way there."""
    with socket.socket(family_of(other), socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # sends nothing
        return str(probe.getsockname()[0])
