"""Training on two devices: what is where, whose numbers, and that nothing is read before it is there."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simgpu")]


def _devices(structure: Any) -> set[str]:
    """Return the devices of all tensors of a structure."""
    from nb_accelerate.training.pytree import tensors_in

    return {str(tensor.device) for tensor in tensors_in(structure)}


def _training(accelerator: Any, **loader_options: Any) -> tuple[Any, ...]:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(
        [{"x": row, "pair": (row.sum(), {"id": 0})} for row in rows], 4, **loader_options
    )
    return accelerator.prepare(model, optimizer, scheduler, loader)


def _train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    import torch

    for batch in loader:
        loss = torch.nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["pair"][0])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_each_rank_has_all_of_its_training_on_its_device(run_ranks):
    def places() -> tuple[str, dict[str, set[str]]]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        found = {"current": {f"simgpu:{torch.simgpu.current_device()}"}}
        model, optimizer, scheduler, loader = _training(accelerator)
        found["model"] = _devices([*model.parameters(), *model.buffers()])
        batch = next(iter(loader))
        found["batch"] = _devices(batch)
        _train(accelerator, model, optimizer, scheduler, loader)
        found["moments"] = _devices([state["exp_avg"] for state in optimizer.state.values()])
        accelerator.backward(model(batch["x"]).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        found["gradients and norm"] = _devices([norm, *[weight.grad for weight in model.parameters()]])
        numbers = {"metric": torch.ones(2, device=accelerator.device), "of batch": batch}
        found["gathered"] = _devices(accelerator.gather(numbers))
        found["for metrics"] = _devices(accelerator.gather_for_metrics(numbers))
        found["reduced"] = _devices(accelerator.reduce(numbers["metric"]))
        found["padded"] = _devices(accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index)))
        twin = copy.deepcopy(accelerator.unwrap_model(model))
        found["copy"] = _devices([*twin.parameters(), *twin.buffers()])
        found["trigger"] = {str(accelerator.device)} if not accelerator.check_trigger() else set()
        return str(accelerator.device), found

    for rank, (device, found) in enumerate(run_ranks(places)):
        assert device == f"simgpu:{rank}"
        elsewhere = {name: devices for name, devices in found.items() if devices != {device}}
        assert elsewhere == {"padded": {"cpu"}}  # a tensor that was on the CPU comes back to it


@pytest.mark.parametrize("placed", ["model first", "optimizer first"])
def test_a_model_that_is_on_the_device_already_stays_as_it_is(run_ranks, placed):
    def prepare(placed: str) -> tuple[bool, list[float]]:
        import torch
        from torch import nn

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        model = nn.Linear(2, 1)
        if placed == "model first":
            model.to(accelerator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.to(accelerator.device)
        weight = model.weight
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
        before = weight.tolist()
        optimizer.step()
        same = accelerator.unwrap_model(model).weight is weight
        return same, [one - other for one, other in zip(before[0], weight.tolist()[0], strict=True)]

    for same, moved in run_ranks(prepare, placed):
        assert same
        assert moved == pytest.approx([1.0, 1.0])


def test_an_optimizer_that_has_stepped_on_the_host_goes_on_with_its_model_on_the_device(run_ranks):
    def train(cpu: bool) -> tuple[set[str], list[float]]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=cpu)
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).square().sum())
        optimizer.step()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return _devices([*model.parameters(), *moments]), accelerator.unwrap_model(model).weight[0].tolist()

    on_cpu = run_ranks(train, True)
    for rank, (devices, weights) in enumerate(run_ranks(train, False)):
        assert devices == {f"simgpu:{rank}"}
        assert weights == pytest.approx(on_cpu[rank][1], abs=1e-6)


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pinned": {"pin_memory": True},
    "workers": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "pinned by workers": {"num_workers": 1, "pin_memory": True, "multiprocessing_context": "forkserver"},
}


@pytest.mark.limit(120)
def test_loaders_of_every_kind_bring_the_numbers_to_the_device(run_ranks):
    def read() -> list[dict[str, Any]]:
        import multiprocessing
        from itertools import product

        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import DataLoaderConfiguration

        multiprocessing.set_forkserver_preload(["torch"])  # each worker would import it
        found = []
        for non_blocking, dispatches in product((False, True), repeat=2):
            config = DataLoaderConfiguration(non_blocking=non_blocking, dispatch_batches=dispatches)
            accelerator = Accelerator(dataloader_config=config)
            found.append({})
            for kind, options in LOADERS.items():
                loader = torch.utils.data.DataLoader(torch.arange(24.0).split(1), 4, **options)
                batches = list(accelerator.prepare(loader))  # several are under way at a time
                found[-1][kind] = _devices(batches), [batch.flatten().tolist() for batch in batches]
        return found

    for rank, found in enumerate(run_ranks(read, deadline=100)):
        batches = [[float(row) for row in range(first, first + 4)] for first in range(4 * rank, 24, 8)]
        assert found == [dict.fromkeys(LOADERS, ({f"simgpu:{rank}"}, batches))] * 4


def test_what_ranks_exchange_is_there_when_it_is_read(run_ranks):
    def exchange() -> list[Any]:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import broadcast

        accelerator = Accelerator()
        mine = torch.full((2,), float(accelerator.process_index + 1), device=accelerator.device)
        found = [accelerator.reduce(mine, "sum").tolist(), accelerator.reduce(mine, "mean").tolist()]
        found += [accelerator.gather(mine).tolist(), broadcast(mine.clone()).tolist()]
        found.append(accelerator.gather({"of the host": mine.cpu()})["of the host"].tolist())
        found.append(accelerator.pad_across_processes(mine[: accelerator.process_index + 1], pad_index=9).tolist())
        if accelerator.is_main_process:
            accelerator.set_trigger()
        return [*found, accelerator.check_trigger()]

    alike = [[3.0, 3.0], [1.5, 1.5], [1.0, 1.0, 2.0, 2.0], [1.0, 1.0], [1.0, 1.0, 2.0, 2.0]]
    assert run_ranks(exchange) == [[*alike, [1.0, 9.0], True], [*alike, [2.0, 2.0], True]]


def _saved_and_loaded(folder: Path, in_background: bool) -> Any:
    import torch

    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    parts = _training(accelerator)
    _train(accelerator, *parts)
    model, optimizer, *_ = parts
    if in_background:  # and nothing else here waits for the device
        accelerator.save_state(folder, async_save=True).wait()
    else:
        accelerator.save_state(folder)
    weights = [weight.tolist() for weight in model.parameters()]
    moments = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    drawn = torch.rand(3, device=accelerator.device).tolist()
    _train(accelerator, *parts)
    accelerator.load_state(folder)
    places = _devices([*model.parameters(), *model.buffers(), *[s["exp_avg"] for s in optimizer.state.values()]])
    again = [weight.tolist() for weight in model.parameters()]
    moments_again = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    drawn_again = torch.rand(3, device=accelerator.device).tolist()
    _train(accelerator, *parts)
    return str(accelerator.device), places, (weights, moments, drawn), (again, moments_again, drawn_again)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_state_comes_back_to_the_device_with_its_random_numbers(run_ranks, tmp_path, in_background):
    drawn = []
    for rank, (device, places, saved, loaded) in enumerate(run_ranks(_saved_and_loaded, tmp_path, in_background)):
        assert device == f"simgpu:{rank}"
        assert places == {device}
        assert loaded == saved
        drawn.append(saved[2])


def test_what_was_saved_on_devices_is_loaded_on_the_cpu_and_the_other_way_round(run_ranks, tmp_path):
    def save(folder: Path, cpu: bool) -> list[Any]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=cpu)
        parts = _training(accelerator)
        _train(accelerator, *parts)
        accelerator.save_state(folder)
        return [weight.tolist() for weight in parts[0].parameters()]

    def load(folder: Path, cpu: bool) -> tuple[set[str], list[Any]]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=cpu)
        model, optimizer, *others = _training(accelerator)
        accelerator.load_state(folder)
        states = [state["exp_avg"] for state in optimizer.state.values()]
        weights = [weight.tolist() for weight in model.parameters()]
        _train(accelerator, model, optimizer, *others)  # goes on
        return _devices([*model.parameters(), *states]), weights

    for number, (saves_on_cpu, loads_on_cpu, ranks) in enumerate(
        [(False, True, 2), (True, False, 2), (False, True, 1)]
    ):
        folder = tmp_path / str(number)
        saved, *_ = run_ranks(save, folder, saves_on_cpu)
        for rank, (devices, loaded) in enumerate(run_ranks(load, folder, loads_on_cpu, world_size=ranks)):
            assert devices == {"cpu" if loads_on_cpu else f"simgpu:{rank}"}
            assert loaded == saved


def test_a_prepared_model_is_saved_without_the_device_and_used_elsewhere(run_ranks, tmp_path):
    def save(folder: Path) -> list[float]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        accelerator.save_model(model, folder)
        accelerator.save(accelerator.get_state_dict(model), folder / "weights.bin", safe_serialization=False)
        accelerator.wait_for_everyone()
        return accelerator.unwrap_model(model).weight.tolist()

    weight, *_ = run_ranks(save, tmp_path)
    import torch  # has no second device in this process
    from safetensors.torch import load_file

    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == weight
    assert torch.load(tmp_path / "weights.bin", map_location="cpu", weights_only=True)["weight"].tolist() == weight


def test_free_memory_gives_the_memory_of_the_device_back(run_ranks):
    def use() -> tuple[bool, bool, int]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        before = torch.simgpu.memory_allocated()
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 256, device=accelerator.device)).sum())
        optimizer.step()
        used = torch.simgpu.memory_allocated() - before
        other = torch.simgpu.memory_allocated(1 - accelerator.local_process_index)
        model, optimizer = accelerator.free_memory(model, optimizer)
        return used >= 4 * 256 * 256 * 4, torch.simgpu.memory_allocated() - before < 4096, other

    assert run_ranks(use) == [(True, True, 0)] * 2


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_computes_on_the_device_as_on_the_cpu(run_ranks, precision):
    def train(cpu: bool, precision: str) -> tuple[str, str, list[float]]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
        parts = _training(accelerator)
        with accelerator.autocast():
            dtype = (torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)).dtype
        _train(accelerator, *parts)
        scale = accelerator.scaler.get_scale() if accelerator.scaler else 1.0
        weights = [number for weight in parts[0].parameters() for number in weight.flatten().tolist()]
        return str(dtype), f"{scale}", weights

    on_device, on_cpu = (run_ranks(train, cpu, precision) for cpu in (False, True))
    for mine, expected in zip(on_device, on_cpu, strict=True):
        assert mine[:2] == expected[:2]
        assert mine[2] == pytest.approx(expected[2], abs=2e-2)


def test_ranks_draw_numbers_of_their_own_and_of_rank_0_when_kept_in_step(run_ranks):
    def draw() -> list[list[float]]:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import set_seed

        accelerator = Accelerator()
        set_seed(3, device_specific=True)
        own = torch.rand(2, device=accelerator.device).tolist()
        set_seed(3)
        same = torch.rand(2, device=accelerator.device).tolist()
        return [own, same]

    (own, same), (own_of_1, same_of_1) = run_ranks(draw)
    assert same == same_of_1 == own  # rank 0 adds nothing to the seed
    assert own != own_of_1


def test_a_device_that_is_full_says_so(run_ranks):
    def fill() -> None:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(512, 512))

    with pytest.raises(Exception, match="out of memory"):
        run_ranks(fill, env={"SIMGPU_MEMORY": "100000"})


def test_batch_sizes_get_smaller_until_they_fit(run_ranks):
    def search() -> list[int]:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import find_executable_batch_size

        accelerator, tried = Accelerator(), []

        @find_executable_batch_size(starting_batch_size=1024)
        def train(batch_size: int) -> None:
            tried.append(batch_size)
            torch.ones(batch_size, 1024, device=accelerator.device)

        train()
        return tried

    [tried] = run_ranks(search, env={"SIMGPU_MEMORY": "2000000"}, world_size=1)
    assert tried == [1024, 921, 828, 745, 670, 603, 542, 487]
