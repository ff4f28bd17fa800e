"""Who a process is, and the life of its process group."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.topology import Topology, read_topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context, devices, group
from nb_accelerate.training.process.setup import setup_process


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 0, 0, 1, 1, 1)),
        (
            {
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
                "LOCAL_WORLD_SIZE": "4",
                "GROUP_RANK": "1",
                "GROUP_WORLD_SIZE": "2",
            },
            (5, 1, 1, 8, 4, 2),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 1, 0, 2, 2, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (3, 1, 1, 4, 2, 2)),
        ({"RANK": "", "WORLD_SIZE": ""}, (0, 0, 0, 1, 1, 1)),
        # A notebook in an allocation of four tasks is one process, not one of four.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 0, 0, 1, 1, 1)),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NUM_NODES": "2",
            },
            (3, 1, 1, 4, 2, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            (1, 0, 1, 2, 1, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 1, 0, 2, 2, 1)),
    ],
)
def test_every_launcher_says_who_a_process_is(variables, place):
    found = read_topology(variables)
    assert (
        found.rank,
        found.local_rank,
        found.node_rank,
        found.world_size,
        found.local_world_size,
        found.num_nodes,
    ) == place


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "fit world_size=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 is too small"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"}, "local_world_size=3 does not fit"),
    ],
)
def test_numbers_that_cannot_be_are_refused(variables, text):
    with pytest.raises(ConfigError, match=text):
        read_topology(variables)


def test_a_process_without_a_launcher_is_alone_and_makes_no_group():
    accelerator = Accelerator()
    assert (accelerator.num_processes, accelerator.process_index, accelerator.is_main_process) == (1, 0, True)
    assert accelerator.distributed_type is DistributedType.NO
    assert not accelerator.use_distributed
    assert not dist.is_initialized()
    accelerator.wait_for_everyone()
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]


def test_a_rank_that_does_not_know_where_to_meet_is_told_what_to_set():
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        setup_process(cpu=True, environment=Environment({"RANK": "1", "WORLD_SIZE": "2"}))


def test_ranks_form_a_group_that_close_ends(run_ranks):
    def live():
        accelerator = Accelerator(cpu=True)
        found = [
            accelerator.num_processes,
            accelerator.process_index,
            str(accelerator.device),
            str(accelerator.distributed_type),
            dist.get_backend(),
        ]
        assert Accelerator().core.process is accelerator.core.process
        group.close()
        group.close()
        assert context.current() is None
        return found, dist.is_initialized()

    assert run_ranks(live) == [([2, rank, "cpu", "MULTI_CPU", "gloo"], False) for rank in range(2)]


def test_a_group_that_exists_is_adopted_and_left_as_it_was(run_ranks):
    def live():
        dist.init_process_group("gloo")
        mine = dist.group.WORLD
        accelerator = Accelerator(cpu=True)
        total = accelerator.reduce(torch.ones(1)).item()
        group.close_owned()
        return total, dist.is_initialized() and dist.group.WORLD is mine

    assert run_ranks(live) == [(2.0, True)] * 2


def test_a_group_made_after_the_first_accelerator_is_noticed(tmp_path):
    assert Accelerator(cpu=True).core.process.group is None
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    process = Accelerator(cpu=True).core.process
    assert process.group is dist.group.WORLD
    assert not process.owns_group
    dist.destroy_process_group()
    assert Accelerator(cpu=True).core.process.group is None


def test_a_forked_child_is_not_its_parent():
    setup_process(cpu=True)
    assert context.current() is not None
    child = os.fork()
    if not child:
        os._exit(0 if context.current() is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_devices_are_shared_out_by_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = Topology(rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2)
    assert devices.choose_device(place, cpu=False)[1] == torch.device("cuda", 1)
    assert devices.choose_device(Topology(), cpu=False)[1] == torch.device("cuda")
    assert devices.choose_device(place, cpu=True)[1] == torch.device("cpu")
    crowded = Topology(rank=2, local_rank=2, world_size=3, local_world_size=3)
    with pytest.raises(ConfigError, match=r"process 3.*2 cuda device"):
        devices.choose_device(crowded, cpu=False)


def test_the_one_device_that_a_process_is_shown_is_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    third = Topology(rank=2, local_rank=2, world_size=4, local_world_size=4)
    assert devices.choose_device(third, cpu=False)[1] == torch.device("cuda", 0)


def test_the_device_in_somebodys_group_is_the_one_that_somebody_chose(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    ninth = Topology(rank=9, local_rank=9, world_size=16, local_world_size=16)

    def device(bound=None, *, guessed=True, cpu=False):
        return str(devices.device_of_group(bound, ninth, guessed=guessed, cpu=cpu)[1])

    assert device(torch.device("cuda", 5)) == "cuda:5"
    assert device(torch.device("cuda", 5), cpu=True) == "cpu"
    assert device() == "cuda:1"
    with pytest.raises(ConfigError, match="process 10 of 16"):
        device(guessed=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device() == "cuda:3"


def test_the_environment_may_name_the_device_of_a_process(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:64")
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert setup_process().device == torch.device("cuda", 64)
    assert chosen == [64]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
    assert devices.choose_device(second, cpu=False, name="cuda:0")[1] == torch.device("cuda", 1)
    assert devices.choose_device(Topology(), cpu=True, name="cuda:0")[1] == torch.device("cpu")


def test_apple_devices_are_used_by_one_process_only(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.choose_device(Topology(), cpu=False)[1] == torch.device("mps")
    two = Topology(world_size=2, local_world_size=2)
    assert devices.choose_device(two, cpu=False)[1] == torch.device("cpu")


def test_cpu_cannot_be_asked_for_once_another_device_was_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    setup_process()
    with pytest.raises(ConfigError, match="already trains on cuda"):
        setup_process(cpu=True)


def test_a_process_that_is_alone_does_the_work_of_any_number_as_in_accelerate():
    accelerator = Accelerator(cpu=True)
    assert accelerator.on_process(process_index=1)(lambda: "done")() == "done"
    assert accelerator.on_local_process(local_process_index=1)(lambda: "done")() == "done"


def test_some_work_is_for_some_ranks_only(run_ranks, tmp_path):
    def work():
        accelerator = Accelerator(cpu=True)
        names = ["on_main_process", "on_local_main_process", "on_last_process"]
        marks = [getattr(accelerator, name)(lambda: "done")() for name in names]
        marks.append(accelerator.on_process(process_index=1)(lambda: "one")())
        marks.append(accelerator.on_local_process(lambda: "local", local_process_index=1)())
        accelerator.print("said")
        mark = tmp_path / "mark"
        with accelerator.main_process_first():
            seen = mark.exists()
            mark.touch()
        with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as part:
            return marks, seen, part

    assert run_ranks(work) == [
        (["done", "done", None, None, None], False, [1, 2]),
        ([None, None, "done", "one", "local"], True, [3, 3]),
    ]


def test_a_group_whose_making_was_interrupted_can_be_made_again(monkeypatch: pytest.MonkeyPatch):
    def make() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_update_default_pg", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make()
    dist.distributed_c10d._world.group_count = 0
    with pytest.raises(ValueError, match="already been created"):
        make()
    group.close()
    make()
    assert dist.get_world_size() == 1
    group.close()
    assert not dist.is_initialized()


def test_a_barrier_after_the_end_of_training_says_what_ended(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        accelerator.end_training()
        with pytest.raises(ConfigError, match=r"end_training\(\) has closed"):
            accelerator.wait_for_everyone()
        Accelerator(cpu=True).wait_for_everyone()
        return True

    assert run_ranks(train) == [True, True]
