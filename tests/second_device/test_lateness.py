"""What a GPU does later is seen by nobody too early: copies, streams, events, collectives that nobody waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("simgpu")


def _wait_for_event() -> None:
    import torch

    torch.simgpu.current_stream().record_event().synchronize()


def _wait_for_query() -> None:
    import torch

    assert torch.simgpu.current_stream().query()


def _wait_for_item() -> None:
    import torch

    torch.ones(1, device="simgpu").item()


def _wait_for_blocking_copy() -> None:
    import torch

    torch.ones(1, device="simgpu").cpu()


def _wait_for_stream() -> None:
    import torch

    torch.simgpu.current_stream().synchronize()


def _wait_for_device() -> None:
    import torch

    torch.simgpu.synchronize()


WAITS = [
    _wait_for_event,
    _wait_for_query,
    _wait_for_item,
    _wait_for_blocking_copy,
    _wait_for_stream,
    _wait_for_device,
]


def test_a_copy_to_pinned_memory_is_there_when_the_host_has_synchronised(run_ranks):
    def copy(wait: Callable[[], None]) -> tuple[bool, bool, list[float]]:
        import torch

        source, pinned = torch.arange(3.0, device="simgpu"), torch.zeros(3).pin_memory()
        pinned.copy_(source, non_blocking=True)
        source += 1  # in order on its stream: the copy has the numbers from before
        source.sum()
        early = pinned.clone()
        wait()
        return pinned.is_pinned(), bool(early.isnan().all()), pinned.tolist()

    def run() -> dict[str, tuple[bool, bool, list[float]]]:
        return {wait.__name__: copy(wait) for wait in WAITS}

    [results] = run_ranks(run, world_size=1)
    assert results == {wait.__name__: (True, True, [0.0, 1.0, 2.0]) for wait in WAITS}


def test_a_pinned_source_is_read_when_the_stream_comes_to_it(run_ranks):
    def run() -> list[list[float]]:
        import torch

        pinned = torch.zeros(2).pin_memory()
        results = []
        for wait in (False, True):
            target = pinned.fill_(1.0).to("simgpu", non_blocking=True)
            if wait:
                torch.simgpu.synchronize()
            pinned.fill_(2.0)  # too early, where nobody has waited
            results.append(target.tolist())
        return results

    assert run_ranks(run, world_size=1) == [[[2.0, 2.0], [1.0, 1.0]]]


def test_a_copy_that_does_not_block_is_late_also_where_torch_chooses_the_memory(run_ranks):
    def run() -> bool:
        import torch

        return bool(torch.ones(3, device="simgpu").to("cpu", non_blocking=True).isnan().all())

    assert run_ranks(run, world_size=1) == [True]


def test_without_lateness_copies_end_at_once(run_ranks):
    def run() -> list[float]:
        import torch

        return torch.ones(2, device="simgpu").to("cpu", non_blocking=True).tolist()

    assert run_ranks(run, world_size=1, env={"SIMGPU_LATE": "0"}) == [[1.0, 1.0]]


def test_a_stream_sees_what_another_does_when_it_has_waited_for_it(run_ranks):
    def run() -> dict[str, Any]:
        import torch

        side, pinned = torch.simgpu.Stream(), torch.ones(2).pin_memory()
        results = {}
        for how in ("not", "stream", "event"):
            target = torch.zeros(2, device="simgpu")
            with torch.simgpu.stream(side):
                assert torch.simgpu.current_stream() == side
                target.copy_(pinned, non_blocking=True)
            if how == "stream":
                torch.simgpu.current_stream().wait_stream(side)
            elif how == "event":
                side.record_event().wait(torch.simgpu.current_stream())
            doubled = target * 2
            torch.simgpu.synchronize()
            results[how] = doubled.tolist()
        assert torch.simgpu.current_stream() == torch.simgpu.default_stream() != side
        return results

    [results] = run_ranks(run, world_size=1)
    assert results == {"not": [0.0, 0.0], "stream": [2.0, 2.0], "event": [2.0, 2.0]}


def test_a_host_that_waits_for_one_stream_also_has_what_that_one_waited_for(run_ranks):
    def run() -> list[float]:
        import torch

        side, pinned = torch.simgpu.Stream(), torch.zeros(2).pin_memory()
        source = torch.ones(2, device="simgpu")
        with torch.simgpu.stream(side):
            pinned.copy_(source, non_blocking=True)
        torch.simgpu.current_stream().wait_stream(side)
        source.add(1)
        torch.simgpu.current_stream().synchronize()
        return pinned.tolist()

    assert run_ranks(run, world_size=1) == [[1.0, 1.0]]


def test_events_measure_time(run_ranks):
    def run() -> bool:
        import torch

        first, second = (torch.simgpu.Event(enable_timing=True) for _ in range(2))
        first.record()
        torch.ones(1000, device="simgpu").sum()
        second.record()
        second.synchronize()
        return first.elapsed_time(second) > 0

    assert run_ranks(run, world_size=1) == [True]


def test_a_loader_pins_batches_for_it(run_ranks):
    def run() -> tuple[list[bool], list[float]]:
        import torch

        loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2, pin_memory=True, num_workers=1)
        batches = list(loader)
        on_device = torch.cat([batch.to("simgpu", non_blocking=True) for batch in batches])
        return [batch.is_pinned() for batch in batches], on_device.tolist()

    assert run_ranks(run, world_size=1) == [([True] * 3, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]


def _started_group() -> Any:
    import torch
    import torch.distributed as dist

    from nb_accelerate import PartialState

    state = PartialState()
    assert dist.get_backend() == "simccl"
    return torch.full((2,), state.process_index + 1.0, device=state.device)


def test_a_collective_has_changed_its_tensor_when_somebody_has_waited(run_ranks):
    def reduce(end: str, tensor: Any) -> bool:
        import torch
        import torch.distributed as dist

        before = tensor.tolist()
        work = dist.all_reduce(tensor, async_op=True)
        if end == "wait":
            work.wait()
        elif end == "device":
            torch.simgpu.synchronize()
        elif end == "future":
            work.get_future().wait()
        elif end == "completed":
            while not work.is_completed():
                pass
        changed = tensor.tolist() == [3.0, 3.0]
        if not changed:
            assert tensor.tolist() == before
        work.wait()
        assert tensor.tolist() == [3.0, 3.0]
        return changed

    def run() -> list[bool]:
        return [reduce(end, _started_group()) for end in ("not", "wait", "device", "future", "completed")]

    assert run_ranks(run) == [[False, True, True, True, True]] * 2


def test_wait_returns_before_other_ranks_have_come(run_ranks):
    def run() -> list[float]:
        import torch.distributed as dist

        tensor = _started_group()
        dist.all_reduce(tensor)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            dist.all_reduce(tensor)  # returns, although rank 1 joins only when it is told that it has
            store.set("returned", "yes")
        else:
            store.get("returned")
            dist.all_reduce(tensor)
        return tensor.tolist()

    assert run_ranks(run) == [[6.0, 6.0]] * 2


def test_a_callback_of_a_future_sees_the_result(run_ranks):
    def run() -> list[float]:
        import torch.distributed as dist

        work = dist.all_reduce(_started_group(), async_op=True)
        halved = work.get_future().then(lambda future: future.value()[0] / 2)
        return halved.wait().tolist()

    assert run_ranks(run) == [[1.5, 1.5]] * 2
