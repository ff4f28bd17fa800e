"""What a launch will be, decided from options and facts: no process, no device."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.base.devices.cuda import CUDA, devices_in
from nb_accelerate.base.devices.xla import XLA
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.machine import MachineFacts, VisibleDevices, facts_here, interface_of, warnings_from
from nb_accelerate.notebook.launch.plan import LaunchPlan, make_plan
from nb_accelerate.notebook.launch.rendezvous import Rendezvous, open_rendezvous
from nb_accelerate.notebook.launch.setup import rank_environ
from nb_accelerate.notebook.ranks.failing.incidents import oom_kills


def plan(facts: dict[str, Any] | None = None, **options: Any) -> LaunchPlan:
    known: dict[str, Any] = {"num_cpus": 8, **(facts or {})}
    return make_plan(LaunchOptions(function=print, **options), MachineFacts(**known))


def gpus(*names: str, **state: str) -> dict[str, Any]:
    """Facts about a machine with CUDA devices."""
    return {"accelerators": (VisibleDevices(kind=CUDA, names=names, **state),)}


T4 = gpus("0", "1")


def chips(number: int, **state: str) -> dict[str, Any]:
    """Facts about a machine with TPU chips."""
    return {"accelerators": (VisibleDevices(kind=XLA, names=tuple(map(str, range(number))), **state),)}


def test_many_ranks_on_a_core_are_announced():
    assert plan({"num_cpus": 2}, num_processes=120).brief.endswith("60 on each core")
    assert plan({"num_cpus": 2}, num_processes=8).brief == "8 processes on CPU"


STARTED = "the XLA runtime was started in this notebook"


@pytest.mark.parametrize(
    ("facts", "options", "said"),
    [
        ({}, {}, "1 rank on CPU, forkserver"),
        ({}, {"num_processes": 2}, "2 ranks on CPU, forkserver, gloo on loopback"),
        ({}, {"num_processes": 2, "mixed_precision": "bf16"}, "2 ranks on CPU, forkserver, gloo on loopback, bf16"),
        (T4, {}, "2 ranks on CUDA, fork (CUDA is untouched here, so data in memory is shared), nccl on loopback"),
        (T4, {"num_processes": 1}, "1 rank on CUDA, fork (CUDA is untouched here, so data in memory is shared)"),
        (
            gpus("0", "1", in_use="CUDA was used in this notebook"),
            {},
            "2 ranks on CUDA, forkserver (CUDA was used in this notebook), nccl on loopback",
        ),
        (
            gpus("0", "1", forbids_fork="the runtime of these GPUs does not survive a fork"),
            {},
            "2 ranks on CUDA, spawn (the runtime of these GPUs does not survive a fork), nccl on loopback",
        ),
        (chips(8), {}, "8 ranks on XLA, xla (XLA is untouched here, so data in memory is shared)"),
        (chips(8), {"num_processes": 8}, "8 ranks on XLA, xla (XLA is untouched here, so data in memory is shared)"),
        (
            chips(1),
            {"mixed_precision": "bf16"},
            "1 rank on XLA, xla (XLA is untouched here, so data in memory is shared), bf16",
        ),
        (chips(8), {"start_method": "forkserver"}, "8 ranks on XLA, forkserver"),
        (chips(1, in_use=STARTED), {}, f"1 rank on XLA, forkserver ({STARTED})"),
        (T4, {"devices": "cpu", "num_processes": 3}, "3 ranks on CPU, forkserver, gloo on loopback"),
        (T4, {"start_method": "spawn"}, "2 ranks on CUDA, spawn, nccl on loopback"),
        (
            gpus(*"01234567"),
            {"num_nodes": 2, "master_addr": "10.0.0.1", "start_method": "forkserver"},
            "8 ranks on CUDA on each of 2 machines, forkserver, nccl",
        ),
    ],
)
def test_one_line_says_what_was_chosen_and_why(facts: dict[str, Any], options: dict[str, Any], said: str) -> None:
    assert plan(facts, **options).describe() == said


@pytest.mark.parametrize(
    ("facts", "is_safe"),
    [
        ({}, True),
        (gpus("0"), True),
        (gpus("0", in_use="CUDA was used in this notebook"), False),
        (gpus("0", forbids_fork="the runtime of these GPUs does not survive a fork"), False),
    ],
)
def test_ranks_on_processors_may_be_forks_unless_a_device_here_is_in_use(facts: dict[str, Any], is_safe: bool) -> None:
    assert plan(facts, devices="cpu", num_processes=2).can_fork is is_safe


@pytest.mark.parametrize(
    ("facts", "options", "text"),
    [
        (T4, {"num_processes": 3}, "num_processes=3.*Write num_processes=2"),
        (gpus("0"), {"num_processes": 2}, "there is 1 GPU,"),
        (T4, {"devices": [0, 2]}, "visible GPUs are 0 to 1"),
        (T4, {"devices": [1], "num_processes": 2}, "there is 1 GPU"),
        ({}, {"devices": [0]}, "no GPU is visible"),
        (chips(1), {"num_processes": 8}, "1 XLA device.*Write num_processes=1"),
        (chips(8), {"num_processes": 2}, "one. Write num_processes=8 or 1"),
        (chips(8), {"devices": [0, 1]}, "chosen by their numbers"),
        (
            chips(8),
            {"num_nodes": 2, "master_addr": "10.0.0.1", "start_method": "forkserver"},
            "num_nodes=2, but XLA devices",
        ),
        (chips(8, in_use=STARTED, held=STARTED), {}, f"{STARTED}. Restart the kernel"),
        (T4, {"start_method": "xla"}, "it starts ranks on XLA devices, and these are to run on CUDA"),
        ({}, {"start_method": "xla"}, "it starts ranks on XLA devices, and these are to run on CPU"),
        ({}, {"start_method": "inline", "num_processes": 2}, "Write num_processes=1"),
        (
            gpus("0", "1", in_use="the CUDA driver is loaded in this notebook"),
            {"start_method": "fork"},
            "start_method='fork' cannot.*'forkserver'",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(facts: Any, options: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plan(facts, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": "gpu"}, r"GPUs, as devices=\[0, 2\]"),
        ({"devices": [0, 0]}, "names a GPU twice"),
        ({"use_port": "many"}, "use_port='many' is not a port"),
        ({"use_port": 70000}, "is not a port"),
        ({"num_nodes": 2}, r"local machine.*master_addr='10\.0\.0\.1'"),
        ({"num_nodes": 2, "node_rank": 2, "master_addr": "10.0.0.1"}, "the last is number 1"),
        ({"num_nodes": 2, "rdzv_backend": "c10d"}, "Write rdzv_endpoint='HOST:29400'"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd' is not a choice"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"log_line_prefix_template": "${rnk}"}, r"only \$\{rank\}, .*'rnk'"),
        ({"log_line_prefix_template": 3}, "is not text"),
        ({"progress": "widgets"}, "progress='widgets' is not a choice"),
        ({"monitor_interval": 0}, "monitor_interval=0"),
        ({"by_value": ["os"]}, r"module. Write by_value=\[my_module\]"),
        ({"kwargs": ["lr"]}, "map names to values"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_to_write(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LaunchOptions(function=print, **options)


def test_forked_ranks_have_one_thread_and_others_share_the_cores() -> None:
    assert plan(num_processes=2).num_threads == 4
    assert plan(num_processes=3).num_threads == 2
    assert plan(num_processes=20).num_threads == 1
    assert plan(num_processes=2, start_method="fork").num_threads == 1


def test_little_shared_memory_is_said_before_a_loader_dies_of_it() -> None:
    assert plan({"shared_memory": 1 << 40}).warnings == ()
    (warning,) = plan({"shared_memory": 64 << 20}).warnings
    assert "64 MiB" in warning
    assert "--shm-size" in warning


def rendezvous(node_rank: int = 0) -> Rendezvous:
    return Rendezvous(
        address="10.0.0.1", port=29500, node_rank=node_rank, interface="eth0", run_id="run", listener=None
    )


def test_a_ranks_environment_is_torchruns() -> None:
    chosen = plan(T4, num_nodes=2, master_addr="10.0.0.1", node_rank=1, mixed_precision="fp16", devices=[1, 0])
    environ = rank_environ(
        chosen,
        rendezvous(1),
        1,
        base={"HOME": "somewhere", "JPY_PARENT_PID": "7", "RANK": "left over"},
        extra={"MINE": "too", "OMP_NUM_THREADS": "5"},
        attempt=2,
        max_restarts=3,
    )
    expected = {
        "HOME": "somewhere",
        "MINE": "too",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "ACCELERATE_MIXED_PRECISION": "fp16",
        "CUDA_VISIBLE_DEVICES": "1,0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "5",
    }
    assert expected.items() <= environ.items()
    assert "JPY_PARENT_PID" not in environ
    assert "ACCELERATE_USE_CPU" not in environ


def test_devices_are_numbers_among_those_that_are_visible() -> None:
    facts = gpus("4", "5", "GPU-8932f937", "7")
    chosen = plan(facts, devices=[0, 2])
    assert chosen.device_names == ("4", "GPU-8932f937")
    given = {"base": {"CUDA_VISIBLE_DEVICES": "0,1"}, "extra": {"CUDA_VISIBLE_DEVICES": "4,5,GPU-8932f937,7"}}
    assert rank_environ(chosen, rendezvous(), 0, **given)["CUDA_VISIBLE_DEVICES"] == "4,GPU-8932f937"
    assert plan(facts, num_processes=2).device_names == ("4", "5")
    assert rank_environ(plan(facts), rendezvous(), 0, base={}, extra={}).get("CUDA_VISIBLE_DEVICES") is None


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("0,1", ("0", "1")),
        (" 3 , GPU-ab", ("3", "GPU-ab")),
        ("", ()),
        ("-1", ()),
        ("2,-1,3", ("2",)),
        ("MIG-a,MIG-b", ("MIG-a",)),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(text: str, devices: tuple[str, ...]) -> None:
    assert devices_in(text) == devices


def test_a_variable_that_asks_for_the_cpu_is_heard_unless_gpus_are_asked_for_by_number() -> None:
    assert plan(T4 | {"prefers_cpu": True}).device == "cpu"
    chosen = plan(T4 | {"prefers_cpu": True}, devices=[1])
    assert chosen.device == "cuda"
    environ = rank_environ(chosen, rendezvous(), 0, base={"ACCELERATE_USE_CPU": "true"}, extra={})
    assert environ["ACCELERATE_USE_CPU"] == "false"
    assert facts_here({"ACCELERATE_USE_CPU": "1"}).prefers_cpu
    assert not facts_here({"ACCELERATE_USE_CPU": "0"}).prefers_cpu


def test_a_clusters_network_interface_is_kept_and_one_machine_stays_on_loopback() -> None:
    base = {"NCCL_SOCKET_IFNAME": "ib0"}
    cluster = replace(rendezvous(), keeps_interface=True)
    several = rank_environ(plan(num_nodes=2, master_addr="10.0.0.1"), cluster, 0, base=base, extra={})
    assert (several["NCCL_SOCKET_IFNAME"], several["GLOO_SOCKET_IFNAME"]) == ("ib0", "eth0")
    alone = rank_environ(plan(), rendezvous(), 0, base=base, extra={})
    assert (alone["NCCL_SOCKET_IFNAME"], alone["GLOO_SOCKET_IFNAME"]) == ("eth0", "eth0")


def test_torch_itself_reads_that_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    environ = rank_environ(plan(num_processes=1), rendezvous(), 0, base={}, extra={})
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert dist.is_torchelastic_launched()


def test_looking_at_this_machine_touches_no_device() -> None:
    facts = facts_here({})
    assert facts.num_cpus >= 1
    assert interface_of("127.0.0.1") == facts.loopback
    assert facts_here({"CUDA_VISIBLE_DEVICES": ""}).num_gpus == 0


def options(**given: Any) -> LaunchOptions:
    return LaunchOptions(function=print, **given)


@pytest.mark.slow
def test_a_driver_is_noticed_by_its_name_whoever_loaded_it_and_from_wherever() -> None:
    program = """
from nb_accelerate.base.devices.cuda import is_loaded
print(is_loaded("libtorch_cpu.so"))
import torch
print(is_loaded("libtorch_cpu.so"), is_loaded("libcuda.so.0"))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=45, check=True)
    assert ran.stdout.split() == ["False", "True", "False"]


def test_ranks_of_one_machine_meet_in_a_file_that_only_they_have_and_nothing_listens() -> None:
    with open_rendezvous(options(), plan()) as place:
        assert place.listener is None
        store, fd = place.store_for(1)
        try:
            assert (store.kind, store.address, store.port) == ("file", "127.0.0.1", place.port)
            assert os.path.samestat(os.fstat(fd), os.fstat(place.file))
            assert os.fstat(fd).st_nlink == 0
        finally:
            os.close(fd)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", place.port), timeout=5)


def test_the_port_of_a_launch_is_nobody_elses_and_ranks_can_listen_on_it() -> None:
    with open_rendezvous(options(), plan()) as place:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", place.port))
        with socket.create_server(("127.0.0.1", place.port)) as server:  # with SO_REUSEADDR, as torch's does
            assert server.getsockname() == ("127.0.0.1", place.port)


def test_the_store_is_a_file_too_where_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _refused)
    with open_rendezvous(options(), plan()) as place:
        assert os.fstat(place.file).st_nlink == 0


def test_where_torch_cannot_open_a_file_without_a_name_the_store_listens_on_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "open", _refused)
    with open_rendezvous(options(), plan()) as place:
        assert place.listener is not None
        assert place.listener.getsockname() == ("127.0.0.1", place.store_port)
        assert place.store_port != place.port
        assert place.store_for(1)[0].kind == "client"
        store, fd = place.store_for(0)
        os.close(fd)
        assert (store.kind, store.port, store.store_port) == ("server", place.port, place.store_port)


def _refused(*_: object, **__: object) -> int:
    raise PermissionError(errno.EPERM, "not here")


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"use_port={port} is taken"):
            open_rendezvous(options(use_port=port), plan()).__enter__()


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_port_of_the_endpoint_that_is_taken_is_refused_as_such(backend: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        given = {"rdzv_backend": backend, "rdzv_endpoint": endpoint, "rdzv_conf": {"is_host": True}}
        with pytest.raises(ConfigError) as refused:
            open_rendezvous(options(num_nodes=2, **given), plan(num_nodes=2, **given)).__enter__()
    assert str(refused.value).startswith(f"rdzv_endpoint='{endpoint}': that port")


def test_a_port_that_is_free_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with open_rendezvous(options(use_port=str(port)), plan()) as place:
        assert place.port == port


def test_an_address_of_another_machine_is_refused_on_machine_0() -> None:
    chosen = options(num_nodes=2, master_addr="192.0.2.1")
    with pytest.raises(ConfigError, match=r"'192\.0\.2\.1'"):
        open_rendezvous(chosen, plan(num_nodes=2, master_addr="192.0.2.1")).__enter__()


def test_who_holds_gpu_memory_is_named() -> None:
    import os

    said = warnings_from(f"{os.getpid()}, 2048\n1, 100\n999999999, 4096\nnot a line\n")
    found = [re.findall(r"this notebook|process \d+|[\d.]+ GiB", one) for one in said]
    assert found == [["this notebook", "2.0 GiB"], ["process 999999999", "4.0 GiB"]]


def test_victims_of_the_out_of_memory_killer_are_counted(tmp_path: Path) -> None:
    vmstat, events = tmp_path / "vmstat", tmp_path / "events"
    vmstat.write_text("pgfault 12\noom_kill 3\n")
    events.write_text("oom 9\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills((vmstat, events, tmp_path / "missing")) == 5
    assert oom_kills() >= 0


@pytest.mark.parametrize(
    ("said", "options", "threads"),
    [
        (None, {}, 4),
        ("3", {}, 3),
        ("3,2", {}, 3),
        ("many", {}, 4),
        ("3", {"start_method": "fork"}, 1),
    ],
)
def test_omp_num_threads_says_how_many_threads_ranks_have(
    said: str | None, options: dict[str, Any], threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", said or "")
    facts = {"num_threads": facts_here({}).num_threads}
    assert plan(facts, num_processes=2, **options).num_threads == threads
    assert facts_here({"OMP_NUM_THREADS": "7"}).num_threads == 7
