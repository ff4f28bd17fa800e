"""simccl between ranks: the numbers of gloo, when NCCL would have them."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("simgpu")


def _trained(cpu: bool) -> tuple[str, list[float]]:
    import torch

    from nb_accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = [(row, row.sum()[None].expand(2)) for row in torch.randn(16, 4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.unwrap_model(model).weight.detach().flatten()
    return str(accelerator.device), weights.tolist()


def test_ranks_train_on_one_device_each_with_the_numbers_of_the_cpu(run_ranks):
    on_devices = run_ranks(_trained, cpu=False)
    on_cpu = run_ranks(_trained, cpu=True)
    assert [device for device, _ in on_devices] == ["simgpu:0", "simgpu:1"]
    assert [device for device, _ in on_cpu] == ["cpu", "cpu"]
    assert on_devices[0][1] == on_devices[1][1] == pytest.approx(on_cpu[0][1], abs=1e-6)


def _collectives(cpu: bool) -> dict[str, Any]:
    """The results of all collectives, as lists of numbers."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    from nb_accelerate import PartialState

    state = PartialState(cpu=cpu)
    rank, size, device = state.process_index, state.num_processes, state.device

    def numbers(count: int, dtype: Any = torch.float32) -> Any:
        return (torch.arange(count, device=device) + 10 * rank + 1).to(dtype)

    def empty(count: int) -> Any:
        return torch.zeros(count, device=device)

    found: dict[str, Any] = {}
    for op in ("SUM", "MIN", "MAX", "PRODUCT"):
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.uint8,
        ):
            tensor = numbers(3, dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            found[f"all_reduce {op} {dtype}"] = tensor.tolist()
    for source in range(size):
        dist.broadcast(tensor := numbers(2), source)
        found[f"broadcast {source}"] = tensor.tolist()
        dist.reduce(tensor := numbers(2), source)
        found[f"reduce {source}"] = tensor.tolist() if rank == source else None
        gathered = [empty(2) for _ in range(size)] if rank == source else None
        dist.gather(numbers(2), gathered, source)
        found[f"gather {source}"] = None if gathered is None else [each.tolist() for each in gathered]
        parts = [numbers(2) + part for part in range(size)] if rank == source else None
        dist.scatter(tensor := empty(2), parts, source)
        found[f"scatter {source}"] = tensor.tolist()
    gathered = [empty(2) for _ in range(size)]
    dist.all_gather(gathered, numbers(2))
    found["all_gather"] = [each.tolist() for each in gathered]
    dist.all_gather_into_tensor(tensor := empty(2 * size), numbers(2))
    found["all_gather_into_tensor"] = tensor.tolist()
    dist.reduce_scatter_tensor(tensor := empty(2), numbers(2 * size))
    found["reduce_scatter_tensor"] = tensor.tolist()
    dist.reduce_scatter(tensor := empty(2), [numbers(2) + part for part in range(size)])
    found["reduce_scatter"] = tensor.tolist()
    for name, collective in (
        ("all_gather", functional.all_gather_into_tensor_coalesced([numbers(2), numbers(1)], dist.group.WORLD)),
        ("reduce", functional.reduce_scatter_tensor_coalesced([numbers(4)], "sum", [0], dist.group.WORLD)),
        ("all_reduce", functional.all_reduce_coalesced([numbers(2), numbers(1)], "sum", dist.group.WORLD)),
    ):
        found[f"coalesced {name}"] = [tensor.tolist() for tensor in collective]
    dist.all_to_all_single(tensor := empty(2 * size), numbers(2 * size))
    found["all_to_all_single"] = tensor.tolist()
    dist.barrier()
    work = [dist.isend(numbers(2), 1 - rank), dist.irecv(tensor := empty(2), 1 - rank)]
    for each in work:
        each.wait()
    found["send and recv"] = tensor.tolist()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    words = [f"of rank {rank}"]
    dist.broadcast_object_list(words, 1)
    found["broadcast_object_list"] = words
    group = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(tensor := numbers(2), group=group)
        found["group of one rank"] = tensor.tolist()
    return found


def test_collectives_have_the_results_of_gloo(run_ranks):
    on_devices, on_cpu = run_ranks(_collectives, cpu=False), run_ranks(_collectives, cpu=True)
    assert on_devices == on_cpu


def test_the_mean_is_the_sum_by_the_number_of_ranks(run_ranks):
    def run() -> tuple[list[float], list[float], list[int]]:
        import torch
        import torch.distributed as dist

        from nb_accelerate import PartialState

        state = PartialState()
        values = torch.full((4,), state.process_index + 1.0, device=state.device)
        part, whole = torch.zeros(2, device=state.device), values.clone()
        dist.reduce_scatter_tensor(part, values, dist.ReduceOp.AVG)
        dist.all_reduce(values, dist.ReduceOp.AVG)
        dist.all_reduce(numbers := whole.long(), dist.ReduceOp.AVG)
        return part.tolist(), values.tolist(), numbers.tolist()

    assert run_ranks(run) == [([1.5] * 2, [1.5] * 4, [1] * 4)] * 2


def _on_the_cpu(dist: Any, tensor: Any) -> None:
    dist.all_reduce(tensor.cpu())


def _not_contiguous(dist: Any, tensor: Any) -> None:
    dist.all_reduce(tensor.view(2, 2).t())


def _of_short_numbers(dist: Any, tensor: Any) -> None:
    dist.all_reduce(tensor.short())


def _bitwise(dist: Any, tensor: Any) -> None:
    dist.all_reduce(tensor.int(), dist.ReduceOp.BOR)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (_on_the_cpu, "backend type associated"),
        (_not_contiguous, "Tensors must be contiguous"),
        (_of_short_numbers, "type is not supported"),
        (_bitwise, "bitwise ReduceOp"),
    ],
)
def test_what_nccl_refuses_is_refused(run_ranks, use, said):
    def run() -> None:
        import torch
        import torch.distributed as dist

        from nb_accelerate import PartialState

        use(dist, torch.ones(4, device=PartialState().device))

    with pytest.raises((RuntimeError, ValueError, TypeError), match=said):
        run_ranks(run)


def test_two_ranks_on_one_device_are_refused(run_ranks):
    def run() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("simccl")
        try:
            dist.all_reduce(torch.ones(1, device="simgpu:0"))
        finally:
            dist.destroy_process_group()

    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        run_ranks(run)


def test_a_rank_that_waits_for_others_is_freed_by_an_abort(run_ranks):
    def run() -> tuple[list[float], str]:
        import threading

        import torch
        import torch.distributed as dist

        from nb_accelerate import PartialState
        from nb_accelerate.training.process import group

        state = PartialState()
        tensor = torch.ones(1, device=state.device)
        dist.all_reduce(tensor)
        if state.process_index == 1:
            dist.distributed_c10d._get_default_store().get("aborted")
            return tensor.tolist(), ""
        dist.all_reduce(tensor)  # rank 1 never joins
        freed = threading.Timer(0.1, group.abort)
        freed.start()
        torch.simgpu.synchronize()
        freed.join()
        numbers = tensor.tolist()
        with pytest.raises(RuntimeError, match="aborted") as refused:
            dist.all_reduce(tensor)
        dist.distributed_c10d._get_default_store().set("aborted", "yes")
        return numbers, type(refused.value).__name__

    assert run_ranks(run) == [([2.0], "DistBackendError"), ([2.0], "")]
