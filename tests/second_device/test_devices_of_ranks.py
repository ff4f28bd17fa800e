"""Each process uses its own device: for its group, its memory, what it exchanges, and nothing on another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

pytestmark = pytest.mark.usefixtures("simgpu")


def test_one_rank_on_one_device_has_a_group_for_its_cells(run_ranks: RunRanks) -> None:
    def join() -> tuple[str, str, str, float]:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from nb_accelerate.training.in_ranks import training_half

        device = training_half.join_group(timedelta(seconds=20))["device"]
        group: Any = dist.group.WORLD
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        return str(device), dist.get_backend(), str(group.bound_device_id), total.item()

    joined = run_ranks(join, world_size=1, env={"SIMGPU_DEVICES": "1"})
    assert joined == [("simgpu", "simccl", "simgpu:0", 1.0)]


def test_a_process_alone_on_a_device_with_a_number_makes_it_the_current_one(run_ranks: RunRanks) -> None:
    def train() -> tuple[str, int, bool]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        held = torch.ones(1000, device=accelerator.device)
        used = accelerator.core.process.kind.memory_allocated()
        return str(accelerator.device), torch.simgpu.current_device(), used >= held.nbytes  # type: ignore[attr-defined]

    assert run_ranks(train, world_size=1, env={"ACCELERATE_TORCH_DEVICE": "simgpu:1"}) == [("simgpu:1", 1, True)]


def test_tensors_on_the_device_of_another_rank_are_exchanged_by_the_own_one(run_ranks: RunRanks) -> None:
    def exchange() -> tuple[list[float], list[float], str]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        rank = accelerator.process_index
        tensor = torch.full((2,), float(rank), device="simgpu:0")
        gathered = accelerator.gather(tensor)
        return gathered.tolist(), accelerator.reduce(tensor, "sum").tolist(), str(gathered.device)

    assert run_ranks(exchange) == [([0.0, 0.0, 1.0, 1.0], [1.0, 1.0], "simgpu:0")] * 2


def test_the_figures_of_a_step_are_those_of_the_own_device_when_they_have_arrived(run_ranks: RunRanks) -> None:
    def train() -> tuple[list[float], list[float], bool]:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.base.progress_page import here
        from nb_accelerate.training.accelerator import losses

        losses._REPORT_SECONDS = 0.0
        accelerator = Accelerator()
        weight = torch.nn.Linear(1, 1, bias=False)
        model = accelerator.prepare(weight)
        page = here()
        reported: list[float] = []
        plain, page.loss = page.loss, reported.append  # type: ignore[method-assign]
        computed = []
        for step in range(4):
            loss = model(torch.full((1, 1), float(step), device=accelerator.device)).sum()
            accelerator.backward(loss)
            computed.append(loss.detach())
        page.loss = plain  # type: ignore[method-assign]
        return reported, torch.stack(computed).tolist(), accelerator.core.memory.measured().used > 0

    for reported, computed, is_measured in run_ranks(train):
        assert reported
        assert set(reported) <= set(computed)
        assert is_measured


def test_ranks_on_the_processor_leave_devices_alone(run_ranks: RunRanks) -> None:
    def train() -> bool:
        import torch

        from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            cpu_offload=True, activation_checkpointing=True, activation_checkpointing_offload=True, min_num_params=1
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        return bool(torch.simgpu.is_initialized())  # type: ignore[attr-defined]

    assert run_ranks(train) == [False, False]


def test_batches_that_come_to_the_processor_are_whole_when_the_loop_has_them(run_ranks: RunRanks) -> None:
    def read() -> list[float]:
        import torch
        from torch.utils.data import DataLoader

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=True))
        rows = [torch.full((2,), float(number), device="simgpu") for number in range(4)]
        return [batch.sum().item() for batch in accelerator.prepare(DataLoader(rows))]

    assert run_ranks(read, world_size=1) == [[0.0, 2.0, 4.0, 6.0]]
