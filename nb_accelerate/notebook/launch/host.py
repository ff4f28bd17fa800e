"""The host of one machine: a process that has the ranks there, and passes on what they and the kernel say.

::

    kernel ==== frames, over stdin and stdout ====> host --- as a kernel does ---> server, ranks

It is to its ranks what a kernel is: they are `LocalRank`s, started by an `ExecutedServer`. Messages stay pickled. It
imports neither torch nor IPython, and runs no user's code. When the kernel ends or is not heard any more, the host
ends, and with it all that it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from nb_accelerate.base.config.file import CONFIG_FILE
from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch import host_facts
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.launch.machine import interface_of
from nb_accelerate.notebook.launch.servers import ExecutedServer, new_warm_server
from nb_accelerate.notebook.ranks.end_reports import end_reports
from nb_accelerate.notebook.ranks.handle import RankEvents
from nb_accelerate.notebook.ranks.sources import Sources
from nb_accelerate.notebook.remote.connection_back import connect, family_of
from nb_accelerate.notebook.remote.frames import (
    LISTENER,
    MACHINE,
    MAGIC,
    NUMBER,
    FrameParser,
    Kind,
    LinkError,
    as_json,
    pack_message,
    unpack_message,
)
from nb_accelerate.notebook.remote.mirror import PageWatch, pack_pieces, unpack_pieces
from nb_accelerate.notebook.remote.sender import SILENCE_LIMIT, FrameSender, ReceivedSegments, SentSegments, Silence
from nb_accelerate.notebook.worker.server.process_tree import set_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.notebook.protocol.channel import Received
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.remote.frames import Frame, Seal


class HostedRank(RankEvents):
    """Passes on what a rank of this machine sends, and what the kernel sends to it.

    Args:
        key: the number of its handle there.
        on_end: called at its end, with its key.
    """

    def __init__(
        self,
        key: int,
        sender: FrameSender,
        sent: SentSegments,
        on_end: Callable[[int], object],
        *,
        rank: int,
        local_rank: int,
        mark: str,
        store_fd: int,
        ends: EndReports,
    ) -> None:
        self.handle = LocalRank(rank, local_rank=local_rank, ends=ends, store_fd=store_fd)
        self.handle.mark = bytes.fromhex(mark)
        self.handle.channel.loads = bytes
        self.page = PageWatch(self.handle.page)
        self.key, self._sender, self._sent, self._on_end = key, sender, sent, on_end
        self._has_messages = False

    @override
    def messages(self, received: Iterable[Received]) -> None:
        for body, fds in received:
            self._has_messages = True
            numbers = [self._sent.number_of(fd) for fd in fds]
            for fd in fds:
                os.close(fd)
            self.send(Kind.MESSAGE, pack_message(numbers), body)

    @override
    def hand_on(self) -> None:
        if self._has_messages:
            self._has_messages = False
            self.handle.catch_up()
            self.send_page()
            self.send(Kind.HAND_ON)

    @override
    def stdout(self, data: bytes) -> None:
        self.handle.receive()  # a display comes before the place where it stands
        self.send(Kind.STDOUT, data)

    @override
    def stderr(self, data: bytes) -> None:
        self.send(Kind.STDERR, data)

    @override
    def stacks(self, data: bytes) -> None:
        self.send(Kind.STACKS, data)

    @override
    def cannot_read(self, error: Exception) -> None:
        raise error  # a channel whose messages stay pickled has only its own errors

    @override
    def ended(self) -> None:
        self.send_page()
        names = ("exitcode", "lost", "is_lost_with_others")
        self.send(Kind.END, as_json({name: getattr(self.handle, name) for name in names}))
        self._on_end(self.key)

    def send(self, kind: Kind, *parts: bytes) -> None:
        self._sender.send(kind, self.key, *parts)

    def send_page(self) -> None:
        """Send what has changed on its page."""
        if pieces := self.page.changed():
            self.send(Kind.PAGE, pack_pieces(pieces))

    def look(self) -> None:
        """Look whether nobody will report its end."""
        if self.handle.is_lost():
            self.handle.give_up()
            self.ended()

    def take(self, frame: Frame) -> None:
        """Do what the kernel says; messages are passed on by the host, which has what comes with them."""
        handle, body = self.handle, frame.body
        if frame.kind == Kind.PID:
            handle.note_pid(*NUMBER.unpack(body))
        elif frame.kind == Kind.SIGNAL:
            (signum,) = NUMBER.unpack(body)
            if signum == signal.SIGKILL:
                handle.kill()
            else:
                handle.signal(signum)
        elif frame.kind == Kind.POKE:
            handle.request(body)
        elif frame.kind == Kind.PAGE:
            self.page.write(unpack_pieces(body))
        elif frame.kind == Kind.FACTS:
            facts = {"processor_time": handle.processor_time(), "starting": handle.starting()}
            self.send(Kind.FACTS, as_json(facts))


# Bytes that wait to be sent from which on no rank is read: one that prints faster than the network is held up.
_FULL = 4 << 20

_PAGE_INTERVAL, _LOOK_INTERVAL = 0.1, 0.5  # seconds between two looks at the pages of ranks, and at their processes

_NO_INPUT = (
    "nb_accelerate: the command does not hand on its stdin: docker exec and kubectl exec need -i, ssh must not have -n"
)

_CONNECT_TIMEOUT = 15.0  # seconds for the kernel to answer where the engine gives no stream


class Host:
    """Passes on frames between the kernel and ranks. `run` it.

    Args:
        reads: descriptor of what the kernel sends.
        writes: descriptor of what it reads.
    """

    def __init__(self, reads: int, writes: int, seal: Seal | None = None) -> None:
        os.set_blocking(reads, False)
        self._reads = reads
        self._received = ReceivedSegments()
        self._parser = FrameParser(seal)
        self._silence = Silence(self._parser, reads)
        self._sources = Sources(lambda: None)
        self._ranks: dict[int, HostedRank] = {}
        self._listener: socket.socket | None = None
        self._servers: dict[bool, ExecutedServer] = {}
        self.sender = FrameSender(writes, seal, preamble=MAGIC, on_beat=self._beat, on_failure=_end_process)
        self.sent = SentSegments(self.sender)

    def run(self) -> None:
        """Run until the kernel says so, or ends."""
        self.sender.send(Kind.HELLO, MACHINE, as_json(host_facts.facts_of_machine()))
        self.sender.start()
        self._server(fresh=False)  # torch is imported while the kernel gets ready
        self._sources.add(self._reads, self._read)
        page_due = look_due = time.monotonic()
        try:
            while True:
                self._sources.wait(page_due - time.monotonic() if self._ranks else SILENCE_LIMIT)
                while self.sender.waiting > _FULL:
                    self._await_room()
                now = time.monotonic()
                if now >= page_due:
                    page_due = now + _PAGE_INTERVAL
                    for rank in self._ranks.values():
                        rank.send_page()
                if now >= look_due:
                    look_due = now + _LOOK_INTERVAL
                    for rank in [*self._ranks.values()]:
                        rank.look()
                self._sources.space_small_reads()
        except _QuitError:
            pass
        finally:
            for rank in [*self._ranks.values()]:
                rank.handle.kill()
            for server in self._servers.values():
                server.close()
            self.sender.close(drop=True)

    def _forget(self, key: int) -> None:
        if rank := self._ranks.pop(key, None):
            rank.handle.disconnect()
            rank.handle.close()

    def _await_room(self) -> None:
        """Wait until less is to be sent, and meanwhile read the kernel, but no rank."""
        poll = select.poll()
        poll.register(self._reads, select.POLLIN)
        if poll.poll(10):
            self._read()

    # Frames of the kernel.

    def _read(self) -> None:
        try:
            size = self._parser.receive(self._reads)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size and not self._parser.heard:
            sys.exit(_NO_INPUT)
        if not size:
            raise _QuitError
        for frame in self._parser:
            if frame.rank == MACHINE:
                self._take(frame)
            elif frame.kind == Kind.START:
                self._start(frame.rank, **json.loads(frame.body))
            elif rank := self._ranks.get(frame.rank):
                self._tell(rank, frame)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.SEGMENT:
            self._received.take(frame.body)
        elif frame.kind == Kind.DROP:
            self._received.drop(frame.body)
        elif frame.kind == Kind.ASK:
            self._answer(**json.loads(frame.body))
        elif frame.kind == Kind.QUIT:
            raise _QuitError

    def _tell(self, rank: HostedRank, frame: Frame) -> None:
        if frame.kind != Kind.MESSAGE:
            rank.take(frame)
            return
        numbers, pickled = unpack_message(frame.body)
        with contextlib.ExitStack() as opened:
            fds = [self._descriptor(number, opened) for number in numbers]
            with contextlib.suppress(OSError):  # it has ended, which its status tells
                rank.handle.channel.send_pickled(pickled, fds)

    def _descriptor(self, number: int, opened: contextlib.ExitStack) -> int:
        if number != LISTENER:
            return self._received.get(number)
        return opened.enter_context(self._taken_listener()).fileno()

    def _taken_listener(self) -> socket.socket:
        listener, self._listener = self._listener, None
        assert listener is not None
        return listener

    def _start(self, key: int, *, fresh: bool, serves: bool, **how: Any) -> None:
        try:
            store_fd = self._taken_listener().detach() if serves else -1
            with end_reports() as ends:
                rank = HostedRank(key, self.sender, self.sent, self._forget, store_fd=store_fd, ends=ends, **how)
                self._ranks[key] = rank
                self._server(fresh=fresh).start([rank.handle])
            rank.handle.connect(self._sources, rank)
        except (OSError, StartError) as error:
            self.sender.send(Kind.END, key, as_json({"exitcode": None, "lost": f"it could not be started: {error}"}))
            self._forget(key)

    def _server(self, *, fresh: bool) -> ExecutedServer:
        server = self._servers.get(fresh)
        if server is not None and not server.is_usable():
            server.close()
            server = None
        if server is None:
            server = ExecutedServer((), fresh=True) if fresh else new_warm_server(for_cells=True)
            self._servers[fresh] = server
        return server

    # Questions.

    def _answer(self, number: int, what: str, **arguments: Any) -> None:
        answers: dict[str, Callable[..., dict[str, Any]]] = {
            "folders": host_facts.folders,
            "listen": self._listen,
            "hush": self._hush,
            "routes": host_facts.routes,
            "reach": host_facts.reach,
            "connections": host_facts.connections,
            "memory": host_facts.memory,
            "differing_files": host_facts.differing_files,
        }
        try:
            answer: dict[str, Any] = answers[what](**arguments)
        except OSError as error:
            answer = {"error": f"{error.strerror or error}"}
        self.sender.send(Kind.ANSWER, MACHINE, as_json({"number": number, **answer}))

    def _listen(self, address: str, port: int) -> dict[str, Any]:
        """Open a socket: that on which the first rank serves the store, or one that others try to reach."""
        self._hush()
        try:
            self._listener = socket.create_server((address, port), family=family_of(address), backlog=1024)
        except OSError as error:
            return {"error": f"cannot listen on {address}:{port or 'a free port'}: {error.strerror or error}"}
        own, port = self._listener.getsockname()[:2]
        return {"port": port, "interface": interface_of(own) or ""}

    def _hush(self) -> dict[str, Any]:
        """Close that socket, unless a rank has it."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        return {}

    # The thread that sends.

    def _beat(self) -> bool:
        self.sent.drop_unused()
        if self._silence.count_beat():
            _end_process("silence", TimeoutError())
        return True


class _QuitError(Exception):
    """The kernel has told this process to end, or has gone."""


def _end_process(_: str, __: BaseException) -> NoReturn:
    """End at once: the kernel cannot be reached. The server sees that, and ends what it has started."""
    os._exit(1)


def main() -> None:
    """Run the host over stdin and stdout, or over a connection back: ``--connect ADDRESS PORT MACHINE``.

    What else is written to stdout goes to stderr.
    """
    set_name("nb-host")
    os.environ.setdefault(CONFIG_FILE, os.devnull)  # the file of the notebook counts, whose variables ranks are sent
    try:
        is_connected = sys.argv[1:2] == ["--connect"]
        if not is_connected and os.isatty(0):
            sys.exit("nb_accelerate: the command allocates a terminal, which changes bytes: write it without -t")
        if is_connected:
            address, port, machine = sys.argv[2:]
            # The secret of the run comes over stdin, because others can read a command line.
            secret = sys.stdin.buffer.read()
            connection, seal = connect(address, int(port), int(machine), secret, seconds=_CONNECT_TIMEOUT)
            reads = writes = connection.detach()
        elif not (stat.S_ISFIFO(mode := os.fstat(0).st_mode) or stat.S_ISSOCK(mode)):  # a file such as /dev/null
            sys.exit(_NO_INPUT)
        else:
            reads, writes, seal = os.dup(0), os.dup(1), None
        with Path(os.devnull).open(encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel says what is to be interrupted
        Host(reads, writes, seal).run()
    except LinkError as error:
        sys.exit(f"nb_accelerate: {error}")


if __name__ == "__main__":
    main()
