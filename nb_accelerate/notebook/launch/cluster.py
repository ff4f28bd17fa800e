"""The machines of a launch or pool whose hosts an engine has placed: ranks there are started, set up and meet.

::

    engine --> a stream to each machine --> `Link` --> what the machine is --> a plan for each, and one for all
           --> the first one listens, the others reach it --> ranks are started --> `Setup` with what is theirs there
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import ConfigError, StartError
from nb_accelerate.notebook.launch.host_facts import SENT_FACTS, own_entries, own_modules, versions
from nb_accelerate.notebook.launch.hosts import keep, open_hosts
from nb_accelerate.notebook.launch.machine import MachineFacts, VisibleDevices, software_here
from nb_accelerate.notebook.launch.meeting import LOOPBACK, addresses_to_try, agree, broken_way, listening
from nb_accelerate.notebook.launch.placing import Placing
from nb_accelerate.notebook.launch.plan import LaunchPlan, make_plan
from nb_accelerate.notebook.launch.rendezvous import Rendezvous
from nb_accelerate.notebook.launch.setup import make_setup, variables_of_file, working_directory
from nb_accelerate.notebook.remote.frames import LISTENER
from nb_accelerate.notebook.remote.link import Link
from nb_accelerate.notebook.remote.rank import RemoteRank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.notebook.launch.engines import Machine
    from nb_accelerate.notebook.launch.meeting import Meeting
    from nb_accelerate.notebook.launch.rendezvous import Meet
    from nb_accelerate.notebook.protocol.messages import Parcel, Setup
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.ranks.handle import RankHandle


@dataclass(frozen=True, kw_only=True)
class _LinkedMachine:
    """A machine, and what ranks are told there."""

    link: Link
    plan: MachinePlan
    cwd: str = ""
    path: tuple[str, ...] = ()
    interface: str = ""


class _ServedByFirstRank(Rendezvous):
    """A rendezvous whose store the first rank serves, at the socket that its host has."""

    @override
    def store_for(self, local_rank: int) -> tuple[StoreSpec, int]:
        spec, _ = super().store_for(local_rank)
        return (spec, -1) if local_rank else (replace(spec, kind="server"), LISTENER)


class Cluster(Placing):
    """Hosts on machines, and the connections to them. `close` it.

    Args:
        check: is called while this waits; what it raises ends the wait.
        reuse_hosts: the hosts stay for the next launch.

    Attributes:
        plan: of all ranks together.
        notes: what the user is to know about machines, and was not told before.

    Raises:
        StartError: a host does not start, or machines do not reach one another.
        ConfigError: machines cannot have the ranks that were asked for.
    """

    is_elsewhere = True

    def __init__(
        self, options: LaunchOptions, check: Callable[[], object] = lambda: None, *, reuse_hosts: bool = False
    ) -> None:
        self.notes: list[str] = []
        self._options = options
        self._check = check
        self._meeting: Meeting | None = None
        self._reuse_hosts = reuse_hosts
        self._is_closed = False
        self._hosts = open_hosts(options, check)
        try:
            self._compare(self._hosts.links)
            plans, self.plan = plan_machines(options, self._hosts.machines, [link.hello for link in self._hosts.links])
            self._machines = self._with_folders(plans)
            self.by_value = self._modules_to_send()
        except BaseException:
            self.close()
            raise
        self.notes = [note for note in self.notes if note not in self._hosts.told_notes]
        self._hosts.told_notes.update(self.notes)

    @override
    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._reuse_hosts:
                keep(self._hosts)
            else:
                self._hosts.close()

    @override
    def give_up(self) -> None:
        for machine in self._machines:
            machine.link.give_up()

    @property
    @override
    def lost(self) -> str:  # type: ignore[override]  # it changes
        links = [machine.link for machine in self._machines]
        return "; ".join(f"machine {link.name} {link.lost}" for link in links if link.lost)

    @property
    @override
    def without_lost(self) -> str:  # type: ignore[override]  # likewise
        engine = self._options.engine
        remaining = [machine for machine in self._machines if not machine.link.lost]
        hosts = ",".join(f"{machine.link.name}:{machine.plan.num_processes}" for machine in remaining)
        flags = {"engine": engine.engine, "hosts": hosts, "command-template": engine.command_template}
        flags |= {"remote-python": engine.remote_python, "address": engine.address}
        return "start " + " ".join(f"--{name} {shlex.quote(value)}" for name, value in flags.items() if value)

    @override
    def reopen(self) -> None:
        if not self.lost:
            return
        self._hosts.reopen(self._check)
        linked = [machine.link for machine in self._machines]
        self._compare([link for link in self._hosts.links if link not in linked])
        self._machines = self._with_folders([machine.plan for machine in self._machines])
        self._meeting = None

    def _compare(self, links: Sequence[Link]) -> None:
        """Note how the software of machines differs from this one's. Raises StartError if ranks cannot run."""
        here = software_here()
        for link in links:
            differences = compare(here, link.hello, python=self._options.engine.remote_python)
            if differences.obstacles:
                raise StartError(f"machine {link.name}: {'. '.join(differences.obstacles)}")
            self.notes += [f"machine {link.name}: {warning}" for warning in differences.warnings]

    def _with_folders(self, plans: Sequence[MachinePlan]) -> list[_LinkedMachine]:
        """Ask each machine which of the folder and the search path of this process are there too."""
        cwd, path = working_directory(), own_entries()
        links = self._hosts.links
        answers = Link.ask_all([(link, "folders", {"cwd": cwd, "path": path}) for link in links], check=self._check)
        machines = []
        for link, plan, answer in zip(links, plans, answers, strict=True):
            if cwd and answer["cwd"] != cwd:
                self.notes.append(f"{link.name} has no folder {cwd}: ranks there work in {answer['cwd']}")
            if answer["missing"]:
                missing = ", ".join(answer["missing"])
                self.notes.append(f"{link.name} does not have these folders of sys.path: {missing}")
            machines.append(_LinkedMachine(link=link, plan=plan, cwd=answer["cwd"], path=tuple(answer["path"])))
        return machines

    def _modules_to_send(self) -> tuple[ModuleType, ...]:
        modules = own_modules(own_entries())
        checksums = versions(modules)
        missing = set[str]()
        queries = [(one.link, "differing_files", {"files": checksums, "path": one.path}) for one in self._machines]
        answers = Link.ask_all(queries, check=self._check)
        for machine, answer in zip(self._machines, answers, strict=True):
            names = answer["names"]
            if names:
                self.notes.append(
                    f"{machine.link.name} does not have {', '.join(sorted(names))} as here: functions and classes of "
                    "these modules are sent along where they are used. Code that imports them there finds what is "
                    "there, or else what is sent"
                )
            missing.update(names)
        return tuple(modules[name] for name in sorted(missing))

    # A start of ranks.

    @override
    def repeated_rendezvous(self, check: Callable[[], object]) -> contextlib.AbstractContextManager[Meet]:
        self._check = check
        return contextlib.nullcontext(self.meet)

    @override
    @contextlib.contextmanager
    def meet(self) -> Iterator[Rendezvous]:  # on a port of the first machine, which the others reach
        if self.lost:
            raise StartError(self.lost)
        meeting = self._meeting = self._agree()
        interfaces = zip(self._machines, meeting.interfaces, strict=True)
        self._machines = [replace(machine, interface=interface) for machine, interface in interfaces]
        yield _ServedByFirstRank(
            address=meeting.address,
            port=meeting.port,
            node_rank=0,
            interface="",
            run_id=f"nb_accelerate-{secrets.token_hex(4)}",
            listener=None,
            keeps_interface=True,
            world_size=self.plan.num_processes,
            part=secrets.token_hex(4),
        )

    def _agree(self) -> Meeting:
        links = [machine.link for machine in self._machines]
        port = int(self._options.use_port or 0)
        if self._meeting is not None:
            return listening(links, self._meeting.address, port, self._check)
        if self._options.master_addr == LOOPBACK:
            engines_address = self._hosts.engine.address(self._hosts.machines[0])
            addresses = addresses_to_try(links, engines_address, self._check)
        else:
            addresses = [self._options.master_addr]
        return agree(links, addresses, port, self._check)

    @override
    def check_ways(self, say: Callable[[str], object]) -> None:
        links, meeting = [machine.link for machine in self._machines], self._meeting

        def check() -> None:
            if meeting is not None and (broken := broken_way(links, meeting)):
                say(f"{broken}. Ranks that wait for those there go on when the network does")

        HelperThread(check, name="ways").start()

    @override
    @contextlib.contextmanager
    def started_ranks(
        self, plan: LaunchPlan, rendezvous: Rendezvous, *, wants_rows: bool
    ) -> Iterator[Sequence[RankHandle]]:
        with contextlib.ExitStack() as stack:
            handles = []
            for rank in range(self.plan.num_processes):
                handles.append(self.start(rank, None, serves=rank == 0))
                stack.callback(handles[-1].close)
                stack.callback(handles[-1].kill)
                handles[-1].page.want_rows(wants_rows)
            yield handles

    @override
    def start(self, rank: int, ends: EndReports | None, *, serves: bool = False) -> RemoteRank:
        """Start a rank, which has the socket of the store if it is to serve that. How it ends, its host reports."""
        machine = self._machine_of(rank)
        fresh = machine.plan.method.name == "spawn"
        ranks = machine.plan.ranks
        handle = RemoteRank(machine.link, rank, local_rank=rank - ranks.start, fresh=fresh, serves=serves)
        if len(ranks) < self.plan.num_processes:
            handle.neighbours = [other for other in ranks if other != rank]
        return handle

    @override
    def setup_of(
        self, handle: RankHandle, plan: LaunchPlan, rendezvous: Rendezvous, notebook: Parcel, *, attempt: int = 0
    ) -> Setup:
        """Return the `Setup` of a rank: the environment of its host with ours on top, and its folder and path there."""
        store, _ = rendezvous.store_for(handle.rank)
        machine = self._machine_of(handle.rank)
        plan = machine.plan
        rendezvous = replace(
            rendezvous, interface=machine.interface, num_nodes=plan.num_machines, node_rank=plan.number
        )
        base = machine.link.hello["variables"] | variables_of_file(self._options.env)
        setup = make_setup(handle, self._options, plan, rendezvous, notebook, store=store, attempt=attempt, base=base)
        return replace(setup, keeps_environ=True, cwd=machine.cwd, sys_path=machine.path)

    @override
    def when_addressed(
        self, handles: Sequence[RankHandle], then: Callable[[tuple[int, ...], tuple[tuple[str, int], ...]], object]
    ) -> None:
        """Call `then` in the loop's thread, when all machines have answered."""
        # Process ids mean nothing elsewhere, so each machine is asked for the addresses of its ranks. A lost machine
        # cannot answer: its addresses count with all ports.
        addresses: set[tuple[str, int]] = set()
        unanswered = set()
        for machine in self._machines:
            pids = [handle.pid for handle in handles if self._machine_of(handle.rank) is machine and not handle.ended]

            def take(answer: dict[str, Any], machine: _LinkedMachine = machine) -> None:
                addresses.update((address, port) for address, port in answer["addresses"])
                unanswered.discard(machine.link)
                if not unanswered:
                    then((), tuple(addresses))

            if machine.link.lost:
                addresses.update((address, 0) for address in machine.link.hello["addresses"])
            else:
                unanswered.add(machine.link)
                machine.link.query("connections", take, pids=[pid for pid in pids if pid])
        if not unanswered:
            then((), tuple(addresses))

    def _machine_of(self, rank: int) -> _LinkedMachine:
        return next(machine for machine in self._machines if rank in machine.plan.ranks)


class Differences(NamedTuple):
    """Differences between this notebook and another machine, each as a sentence."""

    obstacles: tuple[str, ...]  # with these, what is sent cannot be read there, or ranks do not understand one another
    warnings: tuple[str, ...]  # with these, results may differ


def compare(here: Mapping[str, str], there: Mapping[str, str], *, python: str = "python3") -> Differences:
    """Compare the software of this notebook with another machine's.

    Args:
        here: ``"python"``, ``"torch"`` and ``"package"``: their versions; "" for a torch that is not installed.
        there: the same of the machine.
        python: the command that starts Python there, for what users are told to write.
    """
    obstacles: list[str] = []
    warnings: list[str] = []
    if _release(here["python"]) != _release(there["python"]):
        wanted = _release(here["python"])
        obstacles.append(
            f"it has Python {there['python']}, and this notebook {here['python']}: functions are sent as bytecode, "
            f"which only Python {wanted} reads. Write remote_python='python{wanted}', or another one of that version"
        )
    if here["package"] != there["package"]:
        obstacles.append(
            f"it has nb_accelerate {there['package']}, and this notebook {here['package']}. Install this notebook's "
            f"version there: in a clone of its repository, {python} -m pip install ."
        )
    if not there["torch"]:
        wanted = f"torch=={_plain(here['torch'])}" if here["torch"] else "torch"
        also = "" if here["torch"] else ", nor has this notebook: the same version has to be on both"
        obstacles.append(f"it has no PyTorch{also}. Write there: {python} -m pip install {wanted}")
    elif not here["torch"]:
        obstacles.append(
            f"it has PyTorch {there['torch']}, and this notebook has none, which it needs to read values that ranks "
            f"return. Write here: %pip install torch=={_plain(there['torch'])}"
        )
    elif _plain(here["torch"]) != _plain(there["torch"]):
        is_near = _release(here["torch"]) == _release(there["torch"])
        (warnings if is_near else obstacles).append(
            f"it has PyTorch {there['torch']}, and this notebook {here['torch']}. Write there: {python} -m pip install "
            f"torch=={_plain(here['torch'])}"
        )
    return Differences(tuple(obstacles), tuple(warnings))


def _release(version: str) -> str:
    """Return ``"2.13"`` of ``"2.13.0+cpu"``."""
    return ".".join(version.split(".")[:2])


def _plain(version: str) -> str:
    """Return a version without what it was built for: machines may have different GPUs."""
    return version.partition("+")[0]


@dataclass(frozen=True, kw_only=True)
class MachinePlan(LaunchPlan):
    """The plan of one machine among several, which may have different numbers of ranks."""

    first_rank: int = 0
    all_ranks: int = 1
    number: int = 0
    num_machines: int = 1

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_processes)

    @override
    def topology_of(self, local_rank: int, *, node_rank: int = 0) -> Topology:
        return Topology(
            rank=self.first_rank + local_rank,
            local_rank=local_rank,
            node_rank=self.number,
            world_size=self.all_ranks,
            local_world_size=self.num_processes,
            num_nodes=self.num_machines,
        )


def plan_machines(
    options: LaunchOptions, machines: Sequence[Machine], hellos: Sequence[Mapping[str, Any]]
) -> tuple[list[MachinePlan], LaunchPlan]:
    prefers_cpu = Environment({**variables_of_file(options.env), **options.env}).use_cpu
    pairs = zip(machines, hellos, strict=True)
    facts = [_facts(machine, hello, prefers_cpu=prefers_cpu) for machine, hello in pairs]
    counts = _counts(options, machines, facts)
    plans: list[LaunchPlan] = []
    for machine, fact, count in zip(machines, facts, counts, strict=True):
        try:
            plan = make_plan(replace(options, num_processes=count), fact, may_copy=False)
        except ConfigError as error:
            raise ConfigError(f"machine {machine.name}: {error}") from error
        plans.append(replace(plan, warnings=tuple(f"{machine.name}: {line}" for line in plan.warnings)))
    if len({plan.kind.name for plan in plans}) > 1:
        devices = ", ".join(f"{machine.name}: {plan.device}" for machine, plan in zip(machines, plans, strict=True))
        raise ConfigError(f"the machines have different types of device ({devices}). Write devices='cpu'")
    plan_of_all = replace(
        plans[0],
        num_processes=sum(counts),
        machines=tuple(machine.name for machine in machines),
        warnings=tuple(line for plan in plans for line in plan.warnings),
    )
    machine_plans = [
        MachinePlan(
            **vars(plan),
            first_rank=sum(counts[:number]),
            all_ranks=sum(counts),
            number=number,
            num_machines=len(plans),
        )
        for number, plan in enumerate(plans)
    ]
    return machine_plans, plan_of_all


def _facts(machine: Machine, hello: Mapping[str, Any], *, prefers_cpu: bool | None) -> MachineFacts:
    if "error" in hello:
        raise StartError(f"machine {machine.name}: {hello['error']}")
    kinds = {kind.name: kind for kind in DEVICE_KINDS}
    devices = (VisibleDevices(kind=kinds[name], names=tuple(names)) for name, names in hello["devices"].items())
    facts = MachineFacts(accelerators=tuple(devices), **{name: hello[name] for name in SENT_FACTS})
    return facts if prefers_cpu is None else replace(facts, prefers_cpu=prefers_cpu)


def _counts(options: LaunchOptions, machines: Sequence[Machine], facts: Sequence[MachineFacts]) -> list[int]:
    counts = [machine.num_ranks for machine in machines]
    total = options.num_processes
    num_open = counts.count(None)
    if total is None:
        return [max(1, fact.num_gpus) if count is None else count for count, fact in zip(counts, facts, strict=True)]
    remaining = total - sum(count or 0 for count in counts)
    if (num_open == 0 and remaining) or (num_open and (remaining < num_open or remaining % num_open)):
        listed = ", ".join(
            machine.name if machine.num_ranks is None else f"{machine.name}:{machine.num_ranks}" for machine in machines
        )
        raise ConfigError(
            f"num_processes={total} is the number of ranks on all machines together, and cannot be had on {listed}. "
            "Leave num_processes out, and write in hosts how many ranks each machine has"
        )
    return [remaining // num_open if count is None else count for count in counts]
