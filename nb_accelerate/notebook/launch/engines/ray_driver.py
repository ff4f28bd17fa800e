"""The process that is the driver of Ray for `RayEngine`: it places an actor on each machine, which keeps a host there.

::

    kernel --- lines of JSON over stdin ---> driver ---> an actor on each machine ---> its host
           <--------- and stdout -----------

In a process of its own Ray prints nothing in the notebook, starts no threads in it, and finds its environment variables
set before it is imported. It runs as ``__main__``, so that its actors go to machines by value: they need this package
for the host only. When its stdin ends, because the kernel has, it ends all that it has placed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

_PLACE_TIMEOUT = 15.0  # seconds for Ray to reserve what is free, at most
_CONNECT_TIMEOUT = 5.0  # seconds for the head of a cluster to accept a connection

# Seconds between two looks of an actor at what it waits for. Ray says only after seconds that a raylet has ended.
_LOOK_INTERVAL = 0.1

_END_TIMEOUT = 5.0  # seconds for hosts to end by themselves when their streams are closed


class CannotPlaceError(Exception):
    """What was asked for cannot be placed on the cluster; the text says why."""


class Node(NamedTuple):
    """A node of the cluster that is alive."""

    name: str
    address: str
    is_head: bool
    cpus: int
    gpus: int

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Node:
        """Return the node that an entry of ``ray.nodes()`` describes."""
        resources = facts["Resources"]
        return cls(
            name=facts["NodeManagerHostname"],
            address=facts["NodeManagerAddress"],
            is_head="node:__internal_head__" in resources,
            cpus=int(resources.get("CPU", 0)),
            gpus=int(resources.get("GPU", 0)),
        )

    def sort_key(self) -> tuple[bool, str]:
        """Return by what nodes are sorted: the head is the first."""
        return not self.is_head, self.address

    def bundle(self, name: str, num_ranks: int | None) -> dict[str, float]:
        """Return what ranks on it reserve: a GPU each where it has any, else a processor core each.

        Args:
            name: what users call it.
            num_ranks: None for all that the node has.

        Raises:
            CannotPlaceError: it has less than that.
        """
        kind, available = ("GPU", self.gpus) if self.gpus else ("CPU", self.cpus)
        wanted = available if num_ranks is None else num_ranks
        if wanted > available:
            raise CannotPlaceError(
                f"{name} has {available} {kind}s in the cluster of Ray, and is to have {wanted} ranks, with a {kind} "
                f"each. Write hosts=['{name}:{available}'], or start Ray there with more, by --num-{kind.lower()}s"
            )
        node_resource = {f"node:{self.address}": 0.001}  # of a resource that each node has for itself alone
        return {**node_resource, kind: wanted} if wanted else node_resource


def chosen(
    nodes: list[Node], hosts: list[tuple[str, int | None]], num_ranks: int | None
) -> list[tuple[Node, str, int | None]]:
    """Return the nodes that ranks are to be on, with what users call them and the number of ranks there.

    Without hosts these are all nodes with GPUs, or all nodes if none has any; the head is the first. Of these the first
    are filled, as far as the number of ranks goes.

    Args:
        num_ranks: on all nodes together; None for all that they have.

    Raises:
        CannotPlaceError: the cluster has no such node, or less than that.
    """
    if not hosts:
        nodes = [node for node in nodes if node.gpus] or nodes
        names = [node.name for node in nodes]
        unique = [node.name if names.count(node.name) == 1 else node.address for node in nodes]
        return [*zip(nodes, unique, _filled(nodes, num_ranks), strict=False)]
    counts = [number for _, number in hosts if number is not None]
    if num_ranks is not None and len(counts) < len(hosts):
        each, remainder = divmod(num_ranks - sum(counts), len(hosts) - len(counts))
        if each > 0 and not remainder:  # else the launch says that it does not fit
            hosts = [(name, each if number is None else number) for name, number in hosts]
    choices = []
    for name, number in hosts:
        node = next((node for node in nodes if name in (node.name, node.address)), None)
        if node is None:
            listed = ", ".join(f"{node.name} ({node.address})" for node in nodes)
            raise CannotPlaceError(
                f"hosts has {name!r}, which is no node of this cluster of Ray. Its nodes are {listed}. Start the node "
                "that is missing, or leave it out"
            )
        choices.append((node, name, number))
    return choices


def _filled(nodes: list[Node], num_ranks: int | None) -> list[int | None]:
    if num_ranks is None:
        return [None] * len(nodes)
    counts: list[int | None] = []
    placed = 0
    for node in nodes:
        if placed < num_ranks:
            count = min(num_ranks - placed, node.gpus or node.cpus)
            counts.append(count)
            placed += count
    if placed < num_ranks:
        kind = "GPU" if nodes[0].gpus else "CPU"
        raise CannotPlaceError(
            f"the cluster of Ray has {placed} {kind}s, and is to have {num_ranks} ranks, with a {kind} each. "
            f"Write num_processes={placed}, or start Ray on more machines"
        )
    return counts


class Keeper:
    """The actor on a machine. Its only job is to start the host there, and to wait for its end."""

    def keep(self, arguments: list[str], secret: bytes) -> str:
        """Run the host, and return in a sentence how it has ended.

        Args:
            arguments: of the Python that runs this.
            secret: of the run, for its stdin: others can read a command line.
        """
        raylet, environ = os.getppid(), dict(os.environ)
        # Ray has set it to the number of cores of this actor, by default 1. Only a value that was set before is kept.
        if b"\0OMP_NUM_THREADS=" not in b"\0" + Path("/proc/self/environ").read_bytes():
            environ.pop("OMP_NUM_THREADS", None)
        with tempfile.TemporaryFile() as output:
            host = subprocess.Popen(
                [sys.executable, *arguments],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
            )
            assert host.stdin is not None
            with contextlib.suppress(BrokenPipeError), host.stdin:
                host.stdin.write(secret)
            while host.poll() is None:
                if os.getppid() != raylet:
                    host.kill()
                    host.wait()
                    return "its raylet, the process of Ray on that node, has ended"
                time.sleep(_LOOK_INTERVAL)
            output.seek(0)
            lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()][-5:]
        return f"its host, {sys.executable}, ended with exit code {host.returncode}: {'; '.join(lines) or 'no output'}"


class RayCluster:
    """The cluster, and the actors on it.

    Args:
        address: of its head; "" for one of this machine alone, on the loopback interface, which ends with this process.
        hosts: names or addresses of nodes, with the number of ranks on each.
        num_ranks: on all nodes together; None if that is not said.
        folder: for the files of a cluster of this machine alone, which is removed at the end.
    """

    def __init__(self, address: str, hosts: list[tuple[str, int | None]], num_ranks: int | None, folder: str) -> None:
        self._address = address
        self._ends = contextlib.ExitStack()
        self._hosts_ended: list[futures.Future[str]] = []
        self._started_machines: set[int] = set()  # machines on which a host was started
        try:
            self._connect(address, folder)
            self._place(address, hosts, num_ranks)
        except BaseException:
            self.close()
            raise

    def _place(self, address: str, hosts: list[tuple[str, int | None]], num_ranks: int | None) -> None:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        nodes = sorted((Node.of(facts) for facts in ray.nodes() if facts["Alive"]), key=Node.sort_key)
        if not address:  # the cluster is for these ranks alone, which may be more than the processor cores
            nodes = [node if node.gpus else node._replace(cpus=max(node.cpus, num_ranks or 0)) for node in nodes]
        self._choices = chosen(nodes, hosts, num_ranks)
        bundles = [node.bundle(name, number if address or node.gpus else 0) for node, name, number in self._choices]
        group = placement_group(bundles, strategy="STRICT_SPREAD")
        self._ends.callback(remove_placement_group, group)
        if not group.wait(_PLACE_TIMEOUT):
            free = ray.available_resources()
            raise CannotPlaceError(
                f"others use what these ranks need in the cluster of Ray: {_counted(bundles)} were asked for, and "
                f"{_counted([free])} of all nodes are free. Wait until they are, or ask for less: hosts=['NODE:1']"
            )
        self._new_actor = functools.partial(self._actor, group, bundles)
        self._actors = [self._new_actor(index) for index in range(len(bundles))]

    def machines(self) -> list[dict[str, Any]]:
        """Return name, address and number of ranks of each machine."""
        return [{"name": name, "address": node.address, "num_ranks": ranks} for node, name, ranks in self._choices]

    def start(self, machine: int, arguments: list[str], secret: str) -> futures.Future[str]:
        """Start a host; the future is how it has ended. For another one on the machine there is another actor."""
        import ray

        node, name, _ = self._choices[machine]
        if machine in self._started_machines:
            ended: futures.Future[str] = futures.Future()
            try:
                _check_reachable(self._address)
            except CannotPlaceError as error:
                ended.set_result(str(error))
                return ended
            if not any(facts["Alive"] and facts["NodeManagerAddress"] == node.address for facts in ray.nodes()):
                ended.set_result(f"Ray does not run on {name} now. Start it there again: ray start --address ...")
                return ended
            ray.kill(self._actors[machine])
            self._actors[machine] = self._new_actor(machine)
        self._started_machines.add(machine)
        future: futures.Future[str] = self._actors[machine].keep.remote(arguments, bytes.fromhex(secret)).future()
        self._hosts_ended.append(future)
        return future

    def close(self) -> None:
        """End the actors, when hosts have ended by themselves, and the cluster if it is this process's."""
        futures.wait(self._hosts_ended, timeout=_END_TIMEOUT)
        self._ends.close()

    def _connect(self, address: str, folder: str) -> None:
        import ray

        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "nb_accelerate"}
        if address:
            _check_reachable(address)
            ray.init(address=address, **quiet)
            self._ends.callback(ray.shutdown)
            return
        self._ends.callback(shutil.rmtree, folder, ignore_errors=True)
        self._ends.callback(ray.shutdown)
        ray.init(address="local", include_dashboard=False, _temp_dir=folder, **quiet)

    @staticmethod
    def _actor(group: Any, bundles: list[dict[str, float]], index: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return (
            ray.remote(Keeper)
            .options(
                num_cpus=bundles[index].get("CPU", 0),
                num_gpus=bundles[index].get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote()
        )


def _counted(bundles: list[dict[str, float]]) -> str:
    totals = {kind: int(sum(bundle.get(kind, 0) for bundle in bundles)) for kind in ("GPU", "CPU")}
    return " and ".join(f"{number} {kind}s" for kind, number in totals.items() if number) or "0 GPUs and CPUs"


def _check_reachable(address: str) -> None:
    """Connect to the head of a cluster, because Ray tries that for long before it says anything."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        raise CannotPlaceError(
            f"no cluster of Ray answers at address={address!r}: {error.strerror or error}. Start one there with: "
            f"ray start --head --port {port}"
        ) from None


def _why_ended(host_ended: futures.Future[str]) -> str:
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

    try:
        return host_ended.result()
    except ActorDiedError as error:
        why = re.search(r"\bbecause (its [^.]+)\.", str(error))
        return f"the actor of Ray that keeps its host has ended{f', because {why[1]}' if why else ''}"
    except ActorUnavailableError:
        return (
            "the actor of Ray that keeps its host cannot be reached: Ray has ended on that node, or is cut off. This "
            "shows the nodes of the cluster: ray list nodes"
        )
    except RayError as error:
        return " ".join(str(error).split())


def main() -> None:
    """Do what comes over stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints what it likes

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")

    def ended(index: int, host_ended: futures.Future[str]) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # nobody listens any more
            answer(ended=index, why=_why_ended(host_ended))

    try:
        cluster = RayCluster(**json.loads(sys.stdin.readline()))
    except CannotPlaceError as error:
        answer(error=str(error))
        return
    except Exception as error:
        answer(error=f"Ray has failed: {error}")
        return
    with contextlib.closing(cluster):
        answer(machines=cluster.machines())
        for index, line in enumerate(sys.stdin):  # of hosts that were started
            cluster.start(**json.loads(line)).add_done_callback(functools.partial(ended, index))


if __name__ == "__main__":
    main()
