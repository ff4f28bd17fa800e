"""A device, and a start method, are one row each: what is planned, started and run follows from it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nb_accelerate import notebook_launcher
from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.base.devices import CPU, DEVICE_KINDS, GLOO, DeviceKind, backend_named, find_kind
from nb_accelerate.base.start_methods import START_METHODS, StartMethod
from nb_accelerate.base.topology import Topology, read_topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch import placing
from nb_accelerate.notebook.launch.machine import MachineFacts, VisibleDevices, facts_here
from nb_accelerate.notebook.launch.plan import LaunchPlan, make_plan
from nb_accelerate.notebook.launch.rendezvous import Rendezvous
from nb_accelerate.notebook.launch.servers import RankServer
from nb_accelerate.notebook.launch.setup import rank_environ
from nb_accelerate.notebook.pool.options import PoolOptions
from nb_accelerate.training.precision import select_precision
from nb_accelerate.training.process.devices import choose_device

TESTS = Path(__file__).parents[1]

CHIP = DeviceKind(
    name="privateuseone",
    distributed_type="XLA",
    backend=GLOO,
    mixed_precision=("bf16",),
    visibility="CHIPS",
    hidden="none",
    find=lambda visible, _: tuple((visible or "a,b,c,d").split(",")),
    pin=lambda names, local_rank: {"CHIPS": names[local_rank], "CHIP_PROCESSES": str(len(names))},
)


@pytest.fixture
def chip() -> Iterator[DeviceKind]:
    """A machine with four devices of a type that is one new row."""
    DEVICE_KINDS.insert(0, CHIP)
    yield CHIP
    DEVICE_KINDS.remove(CHIP)


def environ(plan: LaunchPlan, local_rank: int, **base: str) -> dict[str, str]:
    rendezvous = Rendezvous(address="127.0.0.1", port=1, node_rank=0, interface="lo", run_id="", listener=None)
    return rank_environ(plan, rendezvous, local_rank, base=base, extra={})


def plan_for(facts: MachineFacts, **options: Any) -> LaunchPlan:
    return make_plan(LaunchOptions(function=print, **options), facts)


def test_a_new_row_is_planned_and_each_rank_is_given_its_device(chip: DeviceKind) -> None:
    facts = facts_here({})
    assert facts.accelerators[0].names == ("a", "b", "c", "d")
    plan = plan_for(facts)
    assert (plan.num_processes, plan.kind, plan.backend) == (4, chip, "gloo")
    assert environ(plan, 2)["CHIPS"] == "c"
    assert "ACCELERATE_USE_CPU" not in environ(plan, 2)
    chosen = plan_for(facts, devices=[3, 1])
    assert [environ(chosen, rank)["CHIPS"] for rank in range(2)] == ["d", "b"]
    assert environ(chosen, 0)["CHIP_PROCESSES"] == "2"
    on_cpu = plan_for(facts, devices="cpu")
    assert environ(on_cpu, 0)["CHIPS"] == "none"
    assert environ(on_cpu, 0)["ACCELERATE_USE_CPU"] == "true"
    assert [found.names for found in facts_here({"CHIPS": "b,c"}).accelerators] == [("b", "c")]
    with pytest.raises(ConfigError, match="there are 4 GPUs"):
        plan_for(facts, num_processes=5)


@pytest.mark.usefixtures("chip")
def test_a_new_row_says_what_it_cannot_compute_in() -> None:
    kwargs: Any = {"autocast": AutocastKwargs(), "scaler": GradScalerKwargs()}
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16' .* privateuseone .*'bf16'"):
        select_precision(PrecisionType.FP16, CHIP, **kwargs)
    assert select_precision(PrecisionType.BF16, CHIP, **kwargs).name == "bf16"


RUN = """
import os
from devices.test_tables import CHIP, DEVICE_KINDS
from nb_accelerate import notebook_launcher
from nb_accelerate.training.process.setup import setup_process

DEVICE_KINDS.insert(0, CHIP)

def train():
    process = setup_process()
    return str(process.device), str(process.distributed_type), os.environ["CHIPS"], process.topology.world_size

print(notebook_launcher(train, num_processes=2))
"""


@pytest.mark.slow
def test_ranks_of_a_new_row_run_on_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", RUN], cwd="tests", capture_output=True, text=True, timeout=50, check=True
    )
    assert re.match("2 processes .*PRIVATEUSEONE, fork", ran.stderr)
    assert eval(ran.stdout) == [("privateuseone", "XLA", name, 2) for name in "ab"]


def found(name: str, *names: str) -> VisibleDevices:
    kind = find_kind(name)
    assert kind is not None
    return VisibleDevices(kind=kind, names=names, in_use=kind.in_use(), forbids_fork=kind.forbids_fork())


def test_an_apple_gpu_is_for_one_rank_and_several_use_the_processor() -> None:
    facts = MachineFacts(num_cpus=8, accelerators=(found("mps", "0"),))
    assert plan_for(facts).describe() == "1 rank on MPS, spawn (Metal does not survive a fork)"
    assert "ACCELERATE_USE_CPU" not in environ(plan_for(facts), 0)
    two = plan_for(facts, num_processes=2)
    assert two.describe() == "2 ranks on CPU, forkserver, gloo on loopback"
    assert environ(two, 0)["ACCELERATE_USE_CPU"] == "true"
    assert plan_for(facts, num_nodes=2, master_addr="10.0.0.1").kind is CPU
    with pytest.raises(ConfigError, match="rank needs its own"):
        plan_for(facts, devices="mps", num_processes=2)


def test_intel_gpus_are_reached_and_can_be_named_beside_better_ones() -> None:
    intel, nvidia = found("xpu", "0", "1"), found("cuda", "0")
    alone = MachineFacts(num_cpus=8, accelerators=(intel,))
    said = "2 ranks on XPU, spawn (the runtime of Intel GPUs does not survive a fork), xccl on loopback"
    assert plan_for(alone).describe() == said
    assert environ(plan_for(alone, devices=[1]), 0)["ZE_AFFINITY_MASK"] == "1"
    both = MachineFacts(num_cpus=8, accelerators=(nvidia, intel))
    assert plan_for(both).device == "cuda"
    assert "NB_ACCELERATE_DEVICE" not in environ(plan_for(both), 0, NB_ACCELERATE_DEVICE="cuda")
    assert environ(plan_for(both, devices="xpu"), 0, ACCELERATE_USE_CPU="1") == environ(
        plan_for(both, devices="xpu"), 0, ACCELERATE_USE_CPU="false", NB_ACCELERATE_DEVICE="xpu"
    )
    with pytest.raises(ConfigError, match="devices='mps'"):
        plan_for(both, devices="mps")


def test_a_rank_uses_the_type_of_device_that_its_launch_has_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    second = Topology.of_machine(1, 2)
    assert choose_device(second, cpu=False)[1] == torch.device("cuda", 1)
    assert choose_device(second, cpu=False, name="xpu")[1] == torch.device("xpu", 1)
    with pytest.raises(ConfigError, match="Devices of type 'npu'"):
        choose_device(second, cpu=False, name="npu")


def test_a_backend_without_a_row_is_one_that_nothing_is_known_of() -> None:
    assert backend_named("nccl").can_abort
    assert not backend_named("gloo").returns_early
    assert backend_named("ucc").returns_early
    assert not backend_named("ucc").can_abort


opened: list[str] = []


@contextlib.contextmanager
def open_mine(options: LaunchOptions) -> Iterator[RankServer]:
    """A starter of somebody else's."""
    opened.append("in")
    with placing.forkserver(options) as server:
        yield server
    opened.append("out")


@pytest.fixture
def mine() -> Iterator[None]:
    """Start methods that are one new row each."""
    before = dict(START_METHODS)
    START_METHODS.clear()
    rows = (
        StartMethod(name="mine", starter=f"{__name__}:open_mine"),
        StartMethod(name="alone", max_ranks=1, max_nodes=1),
    )
    START_METHODS.update({row.name: row for row in rows} | before)
    opened.clear()
    yield
    START_METHODS.clear()
    START_METHODS.update(before)


@pytest.mark.usefixtures("mine")
def test_a_new_start_method_is_chosen_and_starts_ranks() -> None:
    assert notebook_launcher(lambda: 7, (), 1, devices="cpu", progress="off") == [7]
    assert opened == ["in", "out"]
    assert plan_for(MachineFacts(num_cpus=1), num_processes=2).method.name == "mine"
    assert PoolOptions(start_method="mine").start_method == "mine"


@pytest.mark.usefixtures("mine")
def test_a_new_start_method_may_need_no_process_and_says_what_it_cannot_do() -> None:
    assert notebook_launcher(os.getpid, (), start_method="alone", devices="cpu", progress="off") == [os.getpid()]
    with pytest.raises(ConfigError, match=r"start_method='alone' runs.* Write num_processes=1"):
        plan_for(MachineFacts(num_cpus=1), start_method="alone", num_processes=2)
    with pytest.raises(ConfigError, match="num_nodes must be 1"):
        LaunchOptions(function=print, start_method="alone", num_nodes=2, master_addr="10.0.0.1")
    with pytest.raises(ConfigError, match="start_method='alone' is for notebook_launcher"):
        PoolOptions(start_method="alone")


def test_the_numbers_of_a_rank_are_read_as_they_were_written() -> None:
    third = Topology.of_machine(1, 2, node_rank=1, num_nodes=3)
    assert (third.rank, third.world_size) == (3, 6)
    assert read_topology(third.as_variables()) == third
    plan = plan_for(MachineFacts(num_cpus=1), num_processes=2, num_nodes=3, master_addr="10.0.0.1")
    assert plan.topology_of(1, node_rank=1) == third
    assert plan.world_size == 6


def test_the_tables_need_no_torch() -> None:
    program = (
        "import sys, nb_accelerate.base.devices, nb_accelerate.base.start_methods; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
