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
from nb_accelerate.notebook.launch.meeting import LOOPBACK, addresses_to_try, broken_way, listening, meet
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
    from nb_accelerate.notebook.launch.meeting import Met
    from nb_accelerate.notebook.launch.rendezvous import Meet
    from nb_accelerate.notebook.protocol.messages import Parcel, Setup
    from nb_accelerate.notebook.ranks.end_reports import EndReports
    from nb_accelerate.notebook.ranks.handle import RankHandle


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A machine, and what ranks are told there."""

    link: Link
    plan: MachinePlan
    cwd: str = ""
    path: tuple[str, ...] = ()
    interface: str = ""


class _ServedThere(Rendezvous):
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
        self._met_at: Met | None = None
        self._reuse_hosts = reuse_hosts
        self._is_closed = False
        self._hosts = open_hosts(options, check)
        try:
            self._compare(self._hosts.links)
            plans, self.plan = plan_machines(options, self._hosts.machines, [link.hello for link in self._hosts.links])
            self._places = self._placed(plans)
            self.by_value = self._modules_to_send()
        except BaseException:
            self.close()
            raise
        self.notes = [note for note in self.notes if note not in self._hosts.said]
        self._hosts.said.update(self.notes)

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
        for place in self._places:
            place.link.give_up()

    @property
    @override
    def lost(self) -> str:  # type: ignore[override]  # it changes
        return "; ".join(f"machine {place.link.name} {place.link.lost}" for place in self._places if place.link.lost)

    @property
    @override
    def without_lost(self) -> str:  # type: ignore[override]  # likewise
        engine = self._options.engine
        hosts = ",".join(f"{one.link.name}:{one.plan.num_processes}" for one in self._places if not one.link.lost)
        flags = {"engine": engine.engine, "hosts": hosts, "command-template": engine.command_template}
        flags |= {"remote-python": engine.remote_python, "address": engine.address}
        return "start " + " ".join(f"--{name} {shlex.quote(value)}" for name, value in flags.items() if value)

    @override
    def reopen(self) -> None:
        if not self.lost:
            return
        self._hosts.reopen(self._check)
        known = [place.link for place in self._places]
        self._compare([link for link in self._hosts.links if link not in known])
        self._places = self._placed([place.plan for place in self._places])
        self._met_at = None

    def _compare(self, links: Sequence[Link]) -> None:
        """Note how the software of machines differs from this one's. Raises StartError if ranks cannot run."""
        python, here = self._options.engine.remote_python, software_here()
        for link in links:
            differences = compare(here, link.hello, python=python)
            if differences.obstacles:
                raise StartError(f"machine {link.name}: {'. '.join(differences.obstacles)}")
            self.notes += [f"machine {link.name}: {warning}" for warning in differences.warnings]

    def _placed(self, plans: Sequence[MachinePlan]) -> list[_Place]:
        """Ask each machine which of the folder and the search path of this process are there too."""
        cwd, path = working_directory(), own_entries()
        links = self._hosts.links
        answers = Link.ask_all([(link, "place", {"cwd": cwd, "path": path}) for link in links], check=self._check)
        places = []
        for link, plan, found in zip(links, plans, answers, strict=True):
            if cwd and found["cwd"] != cwd:
                self.notes.append(f"{link.name} has no folder {cwd}: ranks there work in {found['cwd']}")
            if found["missing"]:
                self.notes.append(f"{link.name} does not have these folders of sys.path: {', '.join(found['missing'])}")
            places.append(_Place(link=link, plan=plan, cwd=found["cwd"], path=tuple(found["path"])))
        return places

    def _modules_to_send(self) -> tuple[ModuleType, ...]:
        modules = own_modules(own_entries())
        files, found = versions(modules), set[str]()
        places = self._places
        answers = Link.ask_all(
            [(place.link, "others", {"files": files, "path": place.path}) for place in places], check=self._check
        )
        for place, answer in zip(places, answers, strict=True):
            names = answer["names"]
            if names:
                self.notes.append(
                    f"{place.link.name} does not have {', '.join(sorted(names))} as here: functions and classes of "
                    "these modules are sent along where they are used. Code that imports them there finds what is "
                    "there, or else what is sent"
                )
            found.update(names)
        return tuple(modules[name] for name in sorted(found))

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
        met = self._met_at = self._met()
        self._places = [
            replace(place, interface=interface) for place, interface in zip(self._places, met.interfaces, strict=True)
        ]
        yield _ServedThere(
            address=met.address,
            port=met.port,
            node_rank=0,
            interface="",
            run_id=f"nb_accelerate-{secrets.token_hex(4)}",
            listener=None,
            keeps_interface=True,
            world_size=self.plan.num_processes,
            part=secrets.token_hex(4),
        )

    def _met(self) -> Met:
        links = [place.link for place in self._places]
        port = int(self._options.use_port or 0)
        if self._met_at is not None:
            return listening(links, self._met_at.address, port, self._check)
        if self._options.master_addr == LOOPBACK:
            known = self._hosts.engine.address(self._hosts.machines[0])
            addresses = addresses_to_try(links, known, self._check)
        else:
            addresses = [self._options.master_addr]
        return meet(links, addresses, port, self._check)

    @override
    def check_ways(self, say: Callable[[str], object]) -> None:
        links, met = [place.link for place in self._places], self._met_at

        def check() -> None:
            if met is not None and (broken := broken_way(links, met)):
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
        place = self._place_of(rank)
        fresh = place.plan.method.name == "spawn"
        first, end = place.plan.first_rank, place.plan.first_rank + place.plan.num_processes
        handle = RemoteRank(place.link, rank, local_rank=rank - first, fresh=fresh, serves=serves)
        if end - first < self.plan.num_processes:
            handle.neighbours = [other for other in range(first, end) if other != rank]
        return handle

    @override
    def setup_of(
        self, handle: RankHandle, plan: LaunchPlan, rendezvous: Rendezvous, notebook: Parcel, *, attempt: int = 0
    ) -> Setup:
        """Return the `Setup` of a rank: the environment of its host with ours on top, and its folder and path there."""
        store, _ = rendezvous.store_for(handle.rank)
        place = self._place_of(handle.rank)
        there = replace(rendezvous, interface=place.interface, num_nodes=len(self._places), node_rank=place.plan.number)
        base = place.link.hello["variables"] | variables_of_file(self._options.env)
        setup = make_setup(handle, self._options, place.plan, there, notebook, store=store, attempt=attempt, base=base)
        return replace(setup, keeps_environ=True, cwd=place.cwd, sys_path=place.path)

    @override
    def when_addressed(
        self, handles: Sequence[RankHandle], then: Callable[[tuple[int, ...], tuple[tuple[str, int], ...]], object]
    ) -> None:
        """Call `then` in the loop's thread, when all machines have answered."""
        # Process ids of other machines mean nothing there. All ports of a machine that is lost are among the addresses.
        found: set[tuple[str, int]] = set()
        waiting = set()
        for place in self._places:
            pids = [handle.pid for handle in handles if self._place_of(handle.rank) is place and not handle.ended]

            def take(answer: dict[str, Any], place: _Place = place) -> None:
                found.update((address, port) for address, port in answer["addresses"])
                waiting.discard(place.link)
                if not waiting:
                    then((), tuple(found))

            if place.link.lost:
                found.update((address, 0) for address in place.link.hello["addresses"])
            else:
                waiting.add(place.link)
                place.link.query("connections", take, pids=[pid for pid in pids if pid])
        if not waiting:
            then((), tuple(found))

    def _place_of(self, rank: int) -> _Place:
        return next(place for place in self._places if 0 <= rank - place.plan.first_rank < place.plan.num_processes)


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
    """The plan of one machine among several, each with ranks of its own number."""

    first_rank: int = 0
    all_ranks: int = 1
    number: int = 0
    num_machines: int = 1

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
    said = Environment({**variables_of_file(options.env), **options.env}).use_cpu
    facts = [_facts(*one, prefers_cpu=said) for one in zip(machines, hellos, strict=True)]
    counts = _counts(options, machines, facts)
    plans: list[LaunchPlan] = []
    for machine, fact, count in zip(machines, facts, counts, strict=True):
        try:
            plan = make_plan(replace(options, num_processes=count), fact, may_copy=False)
        except ConfigError as error:
            raise ConfigError(f"machine {machine.name}: {error}") from error
        plans.append(replace(plan, warnings=tuple(f"{machine.name}: {line}" for line in plan.warnings)))
    if len({plan.kind.name for plan in plans}) > 1:
        has = ", ".join(f"{machine.name}: {plan.device}" for machine, plan in zip(machines, plans, strict=True))
        raise ConfigError(f"the machines have different types of device ({has}). Write devices='cpu'")
    whole = replace(
        plans[0],
        num_processes=sum(counts),
        machines=tuple(machine.name for machine in machines),
        warnings=tuple(line for plan in plans for line in plan.warnings),
    )
    of_machines = [
        MachinePlan(
            **vars(plan),
            first_rank=sum(counts[:number]),
            all_ranks=sum(counts),
            number=number,
            num_machines=len(plans),
        )
        for number, plan in enumerate(plans)
    ]
    return of_machines, whole


def _facts(machine: Machine, hello: Mapping[str, Any], *, prefers_cpu: bool | None) -> MachineFacts:
    if "error" in hello:
        raise StartError(f"machine {machine.name}: {hello['error']}")
    kinds = {kind.name: kind for kind in DEVICE_KINDS}
    devices = (VisibleDevices(kind=kinds[name], names=tuple(names)) for name, names in hello["devices"].items())
    facts = MachineFacts(accelerators=tuple(devices), **{name: hello[name] for name in SENT_FACTS})
    return facts if prefers_cpu is None else replace(facts, prefers_cpu=prefers_cpu)


def _counts(options: LaunchOptions, machines: Sequence[Machine], facts: Sequence[MachineFacts]) -> list[int]:
    known = [machine.num_ranks for machine in machines]
    total = options.num_processes
    open_ones = known.count(None)
    if total is None:
        return [max(1, fact.num_gpus) if count is None else count for count, fact in zip(known, facts, strict=True)]
    rest = total - sum(count or 0 for count in known)
    if (open_ones == 0 and rest) or (open_ones and (rest < open_ones or rest % open_ones)):
        said = ", ".join(
            machine.name if machine.num_ranks is None else f"{machine.name}:{machine.num_ranks}" for machine in machines
        )
        raise ConfigError(
            f"num_processes={total} is the number of ranks on all machines together, and cannot be had on {said}. "
            "Leave num_processes out, and write in hosts how many ranks each machine has"
        )
    return [rest // open_ones if count is None else count for count in known]
