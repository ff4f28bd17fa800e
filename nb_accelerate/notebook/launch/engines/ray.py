"""Ray: an actor on each machine starts the host there, and the host connects back to the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent import futures
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import MissingDependencyError, StartError
from nb_accelerate.notebook.launch.engines import Engine, Machine
from nb_accelerate.notebook.remote.connection_back import Listener, address_towards
from nb_accelerate.notebook.remote.streams import Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.config.engine import EngineOptions
    from nb_accelerate.notebook.remote.connection_back import Connection

# Seconds for a host to connect: Ray starts a process for the actor, and Python reads its modules.
_CONNECT_TIMEOUT = 60.0

_CLOSE_TIMEOUT = 15.0  # seconds for Ray to end what it has started for us

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
# For a cluster of this machine alone.
_LOOPBACK_ONLY = {
    # On Linux too it has Ray bind all its ports to 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # Seconds; by default 30, which a busy machine may take.
    "RAY_raylet_start_wait_time_s": "120",
    # By default 15, with which ranks get little of a machine on which something else runs, the kernel for one.
    "RAY_worker_niceness": "0",
    # One for each processor core by default; none would be used.
    "RAY_prestart_worker_first_driver": "0",
}


class RayEngine(Engine):
    """Starts hosts by actors of Ray, one a machine.

    The engine's process that talks to Ray is described in `nb_accelerate.notebook.launch.engines.ray_driver`.
    """

    idle_limit = 60.0
    reserves = True

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if not is_installed("ray"):
            raise MissingDependencyError("ray", needed_for="engine='ray'")
        self._driver: _Driver | None = None
        self._listener: Listener | None = None
        self._addresses: dict[str, str] = {}
        self._ended: dict[int, futures.Future[str]] = {}
        self._started_machines: set[int] = set()
        self._num_ranks: int | None = None

    @override
    def machines(self, num_ranks: int | None = None) -> Sequence[Machine]:
        self._num_ranks = num_ranks
        self._driver = _Driver(self.options, num_ranks)
        machines = self._driver.machines
        self._addresses = {machine["name"]: machine["address"] for machine in machines}
        routes = [(address_towards(address), address) for address in self._addresses.values()]
        own_address = next((own for own, address in routes if own != address), routes[0][0])
        self._listener = Listener(own_address, len(machines))
        return [Machine(name=machine["name"], num_ranks=machine["num_ranks"]) for machine in machines]

    @override
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        assert self._driver is not None
        if self._driver.has_ended:  # because the head of Ray has; another head may have been started
            self.close()
            self.machines(self._num_ranks)
            self._started_machines.clear()
        assert self._listener is not None
        number = list(self._addresses).index(machine.name)
        is_again = number in self._started_machines
        if is_again:  # its host was lost, and each has one connection
            self._listener.close()
            self._listener = Listener(self._listener.address, len(self._addresses))
        listener = self._listener
        if is_again or not self._started_machines:  # at first all hosts at once: each takes a second or more
            connect_to = "--connect", listener.address, str(listener.port)
            arguments = [*command[len(self.options.python) :], *connect_to]
            for index in [number] if is_again else range(len(self._addresses)):
                self._ended[index] = self._driver.start(index, [*arguments, str(index)], listener.secret)
        self._started_machines.add(number)
        ended = self._ended[number]
        connection = listener.connections[number]
        either: tuple[futures.Future[Any], ...] = (connection, ended)
        futures.wait(either, timeout=_CONNECT_TIMEOUT, return_when=futures.FIRST_COMPLETED)
        if connection.done():
            return RayStream(machine.name, connection.result(), ended)
        if ended.done() and is_again and self._driver.has_ended:
            return self.start(machine, command)
        if ended.done():
            raise StartError(f"{machine.name}: {ended.result()}")
        raise StartError(
            f"the host of {machine.name} has not connected to {listener.address}, port {listener.port}, within "
            f"{_CONNECT_TIMEOUT:g} s; {listener.num_refused} other connections were refused"
        )

    @override
    def address(self, machine: Machine) -> str | None:
        return self._addresses[machine.name]

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            for connection in self._listener.connections:  # one may have come when nobody waited for it any more
                if connection.done() and not connection.exception():
                    connection.result().socket.close()
        if self._driver is not None:
            self._driver.close()


class RayStream(Stream):
    """The connection of a host that an actor keeps.

    Args:
        ended: why the host or its actor has ended, once it has. Then the connection is at its end on both sides.
    """

    def __init__(self, name: str, connection: Connection, ended: futures.Future[str]) -> None:
        self.name = name
        self.seal = connection.seal
        self._socket = connection.socket
        self._socket.setblocking(False)
        self.reads = self.writes = self._socket.fileno()
        self._ended = ended
        ended.add_done_callback(lambda _: self._shut())

    @override
    def why_ended(self) -> str:
        with contextlib.suppress(futures.TimeoutError):  # the connection may end before Ray tells of the actor
            return self._ended.result(_WHY_TIMEOUT)
        return f"its connection to {self.name} has ended"

    @override
    def close(self, *, at_once: bool = False) -> None:
        self._shut()
        self._socket.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already, here or there
            self._socket.shutdown(socket.SHUT_RDWR)


_WHY_TIMEOUT = 3.0  # seconds for Ray to notice that an actor has ended


class _Driver:
    """The process that is Ray's driver, as the kernel sees it.

    Attributes:
        machines: name, address and number of ranks of each, in the order of ranks.
        has_ended: the process has, and with it all that it has started.

    Raises:
        StartError: Ray cannot place these actors.
    """

    def __init__(self, options: EngineOptions, num_ranks: int | None) -> None:
        address = options.address or os.environ.get("RAY_ADDRESS", "")
        # Ray puts its folder there too: below a longer path the names of its sockets would be too long.
        self._folder = "" if address else tempfile.mkdtemp(prefix="nb-ray-", dir="/tmp")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nb_accelerate.notebook.launch.engines.ray_driver"],
            env=_environ(is_cluster=bool(address)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._ended: list[futures.Future[str]] = []  # of each host that was started, in order
        try:
            self._tell(address=address, hosts=options.machines, num_ranks=num_ranks, folder=self._folder)
            answer = self._read_answer()
            if "error" in answer:
                raise StartError(answer["error"])
        except BaseException:
            self.close()
            raise
        self.machines: list[dict[str, Any]] = answer["machines"]
        self.has_ended = False
        self._thread = HelperThread(self._listen, name="driver-of-ray")
        self._thread.start()

    def start(self, machine: int, arguments: Sequence[str], secret: bytes) -> futures.Future[str]:
        """Start a host; the future is why it has ended."""
        ended: futures.Future[str] = futures.Future()
        self._ended.append(ended)
        self._tell(machine=machine, arguments=list(arguments), secret=secret.hex())
        return ended

    def close(self) -> None:
        """Have Ray end what was started, and the process. Can be repeated."""
        if self._stderr.closed:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):  # processes of Ray that have outlived it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if hasattr(self, "_thread"):
            self._thread.join()
        self._process.stdout.close()
        self._stderr.close()
        if self._folder:  # the process has removed it, unless it was killed
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, **values: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which who reads its answers is told
            self._process.stdin.write(json.dumps(values) + "\n")

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._stderr.seek(0)
        last_lines = self._stderr.read().decode(errors="replace").strip().splitlines()[-5:]
        return {"error": f"the process that talks to Ray has ended: {'; '.join(last_lines) or 'it said nothing'}"}

    def _listen(self) -> None:
        while "error" not in (answer := self._read_answer()):
            self._ended[answer["ended"]].set_result(answer["why"])
        self.has_ended = True
        for ended in self._ended:
            if not ended.done():
                ended.set_result(answer["error"])


def _environ(*, is_cluster: bool) -> dict[str, str]:
    if is_cluster:
        return {**os.environ, **_QUIET}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    # A token given so is not written to the user's home.
    return {**inherited, **_QUIET, **_LOOPBACK_ONLY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
