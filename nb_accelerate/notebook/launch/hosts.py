"""The hosts of a launch. They are kept for the next launch over the same engine, as the warm server is kept here."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import ConfigError, StartError
from nb_accelerate.notebook.launch.engines import open_engine
from nb_accelerate.notebook.launch.servers import close_warm_server
from nb_accelerate.notebook.remote.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.notebook.launch.engines import Machine

_HOST = ("-m", "nb_accelerate.notebook.launch.host")  # arguments of Python that start a host

# Seconds for a host to say what its machine is: the engine may wait for the machine, and Python reads its modules.
_OPEN_TIMEOUT = 60.0

_ANSWER_TIMEOUT = 5.0  # Seconds for a host that was kept to answer. If it does not, others are started.


class Hosts:
    """A host on each machine of an engine, and the connections to them. `close` them, or `keep` them.

    Args:
        check: is called while they are waited for; what it raises ends the wait.

    Raises:
        StartError: one does not start.
    """

    def __init__(self, options: LaunchOptions, check: Callable[[], object]) -> None:
        self._options = options.engine
        self._num_ranks = options.num_processes
        self.told_notes: set[str] = set()  # what users were told about them
        with contextlib.ExitStack() as undo:
            self.engine = open_engine(options.engine)
            undo.callback(self.engine.close)
            self.machines = self.engine.machines(options.num_processes)
            self.links: list[Link] = []
            undo.callback(self._end, self.links)
            for machine in self.machines:  # all at once: each takes seconds
                self.links.append(self._start(machine))
            for link in self.links:
                link.open(_OPEN_TIMEOUT, check)
            self._check_are_several()
            self._resources = undo.pop_all()

    def _check_are_several(self) -> None:
        """Raise ConfigError if a template that names no machine has led to the same one twice."""
        names: dict[str, str] = {}
        for link in self.links if "{host}" not in (self._options.command_template or "{host}") else ():
            other = names.setdefault(link.hello["network"], link.name)
            if link.hello["network"] and other != link.name:
                raise ConfigError(
                    f"{other} and {link.name} are one machine: command_template={self._options.command_template!r} "
                    "does not say which one it means. Write {host} in it where the name of the machine belongs"
                )

    def _start(self, machine: Machine) -> Link:
        return Link(self.engine.start(machine, [*self._options.python, *_HOST]))

    @staticmethod
    def _end(links: Sequence[Link]) -> None:
        with contextlib.ExitStack() as closing:
            for link in links:
                closing.callback(link.close)
            for link in links:  # called before `close`: all are told to quit before the first one is waited for
                closing.callback(link.quit)

    def reopen(self, check: Callable[[], object]) -> None:
        """Start the hosts again that are lost; if one does not start, all of them stay lost. Raises StartError."""
        lost = [number for number, link in enumerate(self.links) if link.lost]
        try:
            for number in lost:
                self.links[number].close()
                self.links[number] = self._start(self.machines[number])
            for number in lost:
                self.links[number].open(_OPEN_TIMEOUT, check)
        except BaseException:
            self._end([self.links[number] for number in lost])
            raise

    def are_for(self, options: LaunchOptions) -> bool:
        """Return whether a launch with these options would start the same ones."""
        reserved = not self.engine.reserves or options.num_processes == self._num_ranks
        return options.engine == self._options and reserved

    def answer(self, check: Callable[[], object]) -> bool:
        try:
            for link in self.links:
                link.ask("hush", seconds=_ANSWER_TIMEOUT, check=check)
        except StartError:
            return False
        return True

    def close(self) -> None:
        """End them, and all that they have started. Can be repeated."""
        self._resources.close()


class _IdleHosts:
    """Hosts between two launches. They end when nobody has taken them for some minutes."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.taken = threading.Event()
        self._thread = HelperThread(self._wait, name="kept-hosts")
        self._thread.start()

    def _wait(self) -> None:
        # A launch may come just now: who takes them under the lock, either this thread or that one, has them.
        if not self.taken.wait(self.hosts.engine.idle_limit) and _take(self):
            self.hosts.close()


_lock = threading.Lock()
_idle_hosts: _IdleHosts | None = None


def open_hosts(options: LaunchOptions, check: Callable[[], object]) -> Hosts:
    """Return the hosts that were kept if they are for this launch and still answer, or else start new ones."""
    if (idle := _take()) is not None:
        with contextlib.ExitStack() as undo:
            undo.callback(idle.hosts.close)
            if idle.hosts.are_for(options) and idle.hosts.answer(check):
                undo.pop_all()
                return idle.hosts
    return Hosts(options, check)


def keep(hosts: Hosts) -> None:
    """Keep hosts for the next launch, in the place of others. Lost hosts, and hosts not to be kept, are ended."""
    global _idle_hosts  # noqa: PLW0603 - one launch at a time is what users do
    if any(link.lost for link in hosts.links) or not Environment().keep_warm:
        hosts.close()
        return
    close_hosts()
    with _lock:
        atexit.register(close_hosts)
        _idle_hosts = _IdleHosts(hosts)


def close_hosts() -> bool:
    """End the hosts that are kept. Return False if there are none."""
    idle = _take()
    if idle is not None:
        idle.hosts.close()
    return idle is not None


def close() -> None:
    """End what is kept between launches: the warm server, and hosts on other machines."""
    close_hosts()
    close_warm_server()


def _take(only: _IdleHosts | None = None) -> _IdleHosts | None:
    """Take what is kept, or only if it is this."""
    global _idle_hosts  # noqa: PLW0603 - see above
    with _lock:
        idle = _idle_hosts if only in (None, _idle_hosts) else None
        if idle is not None:
            atexit.unregister(close_hosts)
            idle.taken.set()
            _idle_hosts = None
        return idle


def _forget() -> None:
    """Forget them, in a process forked from this one: they are the parent's."""
    global _idle_hosts, _lock
    _idle_hosts, _lock = None, threading.Lock()
    atexit.unregister(close_hosts)


os.register_at_fork(after_in_child=_forget)
