"""simgpu by itself: what it refuses as CUDA does, memory, random numbers, autocast, and the traps of its making."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("simgpu")

MIB = 2**20


@pytest.fixture
def in_rank(run_ranks) -> Callable[..., Any]:
    """Run a function in a process that has the device."""

    def run(function: Callable[..., Any], *args: Any, **env: str) -> Any:
        return run_ranks(function, *args, world_size=1, env=env)[0]

    return run


# --- what CUDA refuses


def _add(first: str, second: str) -> None:
    import torch

    torch.ones(2, device=first) + torch.ones(2, device=second)


def _matmul(first: str, second: str) -> None:
    import torch

    torch.nn.Linear(2, 2).to(first)(torch.ones(2, 2, device=second))


def _convolution(first: str, second: str) -> None:
    import torch

    torch.nn.Conv1d(1, 1, 1).to(first)(torch.ones(1, 1, 2, device=second))


def _list(first: str, second: str) -> None:
    import torch

    torch._foreach_add([torch.ones(2, device=first)], [torch.ones(2, device=second)])


@pytest.mark.parametrize("operation", [_add, _matmul, _convolution, _list])
def test_tensors_of_two_devices_are_refused(in_rank, operation):
    def run() -> None:
        for devices in (("simgpu:0", "simgpu:1"), ("simgpu:0", "cpu"), ("cpu", "simgpu:1")):
            with pytest.raises(RuntimeError, match=r"same device|should be the same"):
                operation(*devices)

    in_rank(run)


def test_a_number_on_another_device_is_refused_and_one_on_the_cpu_is_not(in_rank):
    def run() -> float:
        import torch

        here = torch.ones((), device="simgpu:0")
        with pytest.raises(RuntimeError, match="same device"):
            here + torch.ones((), device="simgpu:1")
        return (here + torch.ones(())).item()

    assert in_rank(run) == 2.0


def test_indices_may_be_on_the_cpu_and_values_may_not(in_rank):
    def run() -> list[float]:
        import torch

        table, index = torch.arange(4.0, device="simgpu"), torch.tensor([1, 3])
        with pytest.raises(RuntimeError, match="same device"):
            table[index] = torch.ones(2)
        with pytest.raises((RuntimeError, IndexError)):
            torch.arange(4.0)[index.to("simgpu")]
        return table[index].tolist()

    assert in_rank(run) == [1.0, 3.0]


def test_numpy_of_its_memory_is_refused(in_rank):
    def run() -> None:
        import numpy as np
        import torch

        np.asarray(torch.ones(2, device="simgpu"))

    with pytest.raises(TypeError, match="can't convert simgpu:0 device"):
        in_rank(run)


def test_a_device_that_is_not_there_is_refused(in_rank):
    def run() -> None:
        import torch

        for use in (
            lambda: torch.ones(2, device="simgpu:2"),
            lambda: torch.simgpu.set_device(2),
            lambda: torch.simgpu.device(2).__enter__(),
            lambda: torch.simgpu.get_device_properties(2),
        ):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):  # torch.AcceleratorError is one
                use()

    in_rank(run)


def test_visible_devices_are_renumbered_and_the_rest_is_not_there(in_rank):
    def run() -> tuple[int, str]:
        import torch

        return torch.simgpu.device_count(), torch.simgpu._uuid(0)[-2:]

    assert in_rank(run, SIMGPU_VISIBLE_DEVICES="1") == (1, "-1")
    assert in_rank(run, SIMGPU_VISIBLE_DEVICES="1,0") == (2, "-1")
    assert in_rank(run, SIMGPU_VISIBLE_DEVICES="0,5,1") == (1, "-0")


FORKS = """
import os, torch

def said_by_a_fork():
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            message = str(torch.ones(2, device="simgpu").sum().item())
        except RuntimeError as error:
            message = str(error).splitlines()[0]
        os.write(writing, message.encode())
        os._exit(0)
    os.wait()
    return os.read(reading, 1000).decode()

print(said_by_a_fork())
torch.ones(2, device="simgpu")
print(said_by_a_fork())
"""


def test_a_fork_of_a_process_that_has_used_it_cannot():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert before == "2.0"
    assert after.startswith("Cannot re-initialize simgpu in forked subprocess")


def test_without_devices_there_are_none(in_rank):
    def run() -> tuple[bool, int]:
        import torch

        with pytest.raises(RuntimeError, match="simgpu devices are available"):
            torch.ones(2, device="simgpu")
        return torch.simgpu.is_available(), torch.simgpu.device_count()

    assert in_rank(run, SIMGPU_DEVICES="0") == (False, 0)


# --- memory


def test_memory_is_limited_counted_and_given_back(in_rank):
    def run() -> list[float]:
        import torch

        seen = []

        def look() -> None:
            seen.append([f(0) / MIB for f in (torch.simgpu.memory_allocated, torch.simgpu.memory_reserved)])

        first = torch.empty(5 * MIB, dtype=torch.uint8, device="simgpu")
        look()
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 6 MiB. GPU 0"):
            torch.empty(6 * MIB, dtype=torch.uint8, device="simgpu")
        torch.empty(6 * MIB, dtype=torch.uint8, device="simgpu:1")  # that one has room
        del first
        look()
        torch.empty(6 * MIB, dtype=torch.uint8, device="simgpu")
        torch.simgpu.empty_cache()
        look()
        seen.append(torch.simgpu.max_memory_allocated(0) / MIB)
        torch.simgpu.reset_peak_memory_stats(0)
        seen.append(torch.simgpu.max_memory_allocated(0) / MIB)
        seen.append(torch.simgpu.mem_get_info(0)[0] / MIB)
        return seen

    assert in_rank(run, SIMGPU_MEMORY=str(10 * MIB)) == [[5, 5], [0, 5], [0, 0], 6, 0, 10]


def test_new_memory_holds_no_numbers(in_rank):
    def run() -> bool:
        import torch

        return bool(torch.empty(4, device="simgpu").isnan().all())

    assert in_rank(run)


# --- random numbers


def test_each_device_draws_from_its_own_generator_and_the_cpu_from_another(in_rank):
    def run() -> None:
        import torch

        def draw(device: str) -> list[float]:
            return torch.randn(3, device=device).tolist()

        torch.manual_seed(0)
        on_cpu, on_0, on_1 = draw("cpu"), draw("simgpu:0"), draw("simgpu:1")
        assert on_0 == on_1 != on_cpu
        state = torch.simgpu.get_rng_state(1)
        after = draw("simgpu:1")
        torch.simgpu.set_rng_state(state, 1)
        assert draw("simgpu:1") == after
        assert draw("simgpu:0") == after  # which was at the same number, and nobody drew from it meanwhile
        torch.simgpu.manual_seed_all(0)
        assert draw("simgpu:1") == on_1
        assert torch.simgpu.initial_seed() == 0
        own = torch.Generator("simgpu:1").manual_seed(0)
        assert torch.randn(3, device="simgpu:1", generator=own).tolist() == on_1

    in_rank(run)


def test_dropout_and_permutations_do_not_touch_the_generator_of_the_cpu(in_rank):
    def run() -> None:
        import torch

        before = torch.get_rng_state()
        torch.manual_seed(3)
        of_seed = torch.get_rng_state()
        draws = []
        for _ in range(2):
            torch.simgpu.manual_seed(7)
            dropped = torch.nn.functional.dropout(torch.ones(64, device="simgpu"))
            native, _ = torch.native_dropout(torch.ones(64, device="simgpu"), 0.5, True)
            draws.append([*dropped.tolist(), *native.tolist(), *torch.randperm(9, device="simgpu").tolist()])
        assert draws[0] == draws[1]
        assert torch.equal(torch.get_rng_state(), of_seed)
        assert not torch.equal(before, of_seed)

    in_rank(run)


def test_a_generator_of_the_cpu_is_refused(in_rank):
    def run() -> None:
        import torch

        torch.randn(2, device="simgpu", generator=torch.Generator())

    with pytest.raises(RuntimeError, match="Expected a 'simgpu' device type"):
        in_rank(run)


def test_checkpointed_layers_draw_the_same_numbers_again(in_rank):
    def run() -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        ones = torch.ones(64, device="simgpu", requires_grad=True)
        dropped = checkpoint(torch.nn.functional.dropout, ones, use_reentrant=False)
        dropped.sum().backward()
        assert torch.equal(ones.grad, dropped.detach())

    in_rank(run)


# --- autocast and the scaler


def test_autocast_chooses_the_precision_of_each_operator(in_rank):
    def run() -> list[str]:
        import torch

        x = torch.ones(2, 2, device="simgpu")
        with torch.autocast("simgpu", torch.bfloat16):
            results = [x @ x, torch.nn.functional.softmax(x @ x, -1), x.half() + x]
        return [str(result.dtype) for result in results]

    assert in_rank(run) == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_the_scaler_skips_a_step_with_an_overflow(in_rank):
    def run() -> tuple[float, float]:
        import torch

        weight = torch.nn.Parameter(torch.ones(2, device="simgpu"))
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("simgpu", init_scale=4.0)
        for factor in (float("inf"), 0.5):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weight[0].item(), scaler.get_scale()

    assert in_rank(run) == (0.5, 2.0)


# --- traps of a device of one's own


def test_what_allocates_stays_on_the_device_of_its_tensor(in_rank):
    def run() -> list[int]:
        import torch

        grown = torch.empty(0, device="simgpu:1").resize_(4)
        out = torch.empty(0, device="simgpu:1")
        torch.add(torch.ones(4, device="simgpu:1"), 1, out=out)
        storage = torch.ones(4, device="simgpu:1").untyped_storage()
        storage.resize_(64)
        set_ = torch.empty(0, device="simgpu:1").set_(storage, 0, (16,), (1,))
        found = [torch.simgpu.memory_allocated(0), grown.device.index, out.device.index, set_.device.index]
        return [*found, int(out.sum().item()), int(set_[:4].sum().item())]

    assert in_rank(run) == [0, 1, 1, 1, 8, 4]


def test_a_module_that_moves_keeps_its_parameters(in_rank):
    def run() -> bool:
        import torch

        layer = torch.nn.Linear(2, 2)
        before = layer.weight
        layer.to("simgpu:1")
        return layer.weight is before and str(before.device) == "simgpu:1"

    assert in_rank(run)


def test_results_outlive_what_they_were_made_of(in_rank):
    def run() -> float:
        import gc

        import torch

        x = torch.ones(1000, device="simgpu").view(10, 100).t()[3:7].conj()
        gc.collect()
        filler = [torch.full((1000,), 5.0, device="simgpu") for _ in range(20)]
        return x.sum().item() + 0 * filler[0].sum().item()

    assert in_rank(run) == 40.0


def _convolution_and_attention() -> tuple[Any, Any]:
    import torch

    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(2)]
    encoder = torch.nn.TransformerEncoderLayer(36, 2, 8, dropout=0, batch_first=True)
    return torch.nn.Sequential(*layers, encoder), torch.randn(2, 3, 8, 8)


def _lstm() -> tuple[Any, Any]:
    import torch

    return torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True), torch.randn(5, 2, 3)


def _gru() -> tuple[Any, Any]:
    import torch

    return torch.nn.GRU(3, 4, bias=False), torch.randn(5, 2, 3)


@pytest.mark.parametrize("make", [_convolution_and_attention, _lstm, _gru])
def test_it_computes_what_the_cpu_does(in_rank, make):
    def run() -> float:
        import torch

        torch.manual_seed(0)
        model, inputs = make()
        gradients = []
        for device in ("cpu", "simgpu:1"):
            model.to(device).zero_grad()
            outputs = model(inputs.to(device))
            (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum().backward()
            gradients.append(torch.cat([p.grad.cpu().flatten() for p in model.parameters()]))
        return (gradients[0] - gradients[1]).abs().max().item()

    assert in_rank(run) < 1e-3


# --- files


def test_saved_tensors_come_back_to_their_device_or_where_they_are_sent(in_rank, tmp_path):
    def save(path: str) -> None:
        import torch

        torch.save(torch.arange(3.0, device="simgpu:1"), path)

    def load(path: str, map_location: Any) -> tuple[str, list[float]]:
        import torch

        tensor = torch.load(path, map_location=map_location)
        return str(tensor.device), tensor.tolist()

    path = str(tmp_path / "tensor.pt")
    in_rank(save, path)
    numbers = [0.0, 1.0, 2.0]
    assert in_rank(load, path, None) == ("simgpu:1", numbers)
    assert in_rank(load, path, "cpu") == ("cpu", numbers)
    assert in_rank(load, path, {"simgpu:1": "simgpu:0"}) == ("simgpu:0", numbers)
    with pytest.raises(RuntimeError, match=r"device 1 but torch.simgpu.device_count\(\) is 1"):
        in_rank(load, path, None, SIMGPU_DEVICES="1")
    with pytest.raises(RuntimeError, match=r"torch.simgpu.is_available\(\) is False"):
        in_rank(load, path, None, SIMGPU_DEVICES="0")
