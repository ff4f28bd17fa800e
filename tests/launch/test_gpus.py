"""Launching where there are GPUs: needs at least one CUDA device.

`tests/second_device/test_launches.py` runs these tests on devices that are made of host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fixtures.devices import Gpus
from fixtures.kernels import Kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.limit(120),
]

SETUP = """
import torch
from nb_accelerate import Accelerator, notebook_launcher

def where():
    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum").item()
    return str(accelerator.device), accelerator.num_processes, total
"""


@pytest.fixture(scope="module")
def notebook(gpus: Gpus, shared_kernel: Kernel) -> Kernel:
    """It does not touch a GPU."""
    shared_kernel.run(SETUP).ok()
    return shared_kernel


@pytest.fixture(scope="module")
def user(gpus: Gpus) -> Iterator[Kernel]:
    """A notebook that has used a GPU."""
    with contextlib.closing(Kernel()) as one:
        one.run(SETUP).ok()
        one.run(f"x = torch.ones(4, device='{gpus.type}').sum().item()").ok()
        yield one


def expected(gpus: Gpus) -> list[tuple[str, int, float]]:
    return [(name, gpus.count, float(gpus.count)) for name in gpus.names]


def is_untouched(notebook: Kernel, gpus: Gpus) -> bool:
    return notebook.run(f"torch.{gpus.type}.is_initialized()").ok().value == "False"


def test_every_gpu_gets_a_rank_forked_from_a_kernel_that_did_not_touch_it(notebook: Kernel, gpus: Gpus) -> None:
    cell = notebook.run("print(notebook_launcher(where))").ok()
    line, values = cell.stdout.splitlines()
    assert f"on {gpus.type.upper()}, fork ({gpus.type.upper()} is untouched here" in line
    assert values == str(expected(gpus))
    assert is_untouched(notebook, gpus)


def test_a_kernel_that_used_a_gpu_launches_without_a_restart(user: Kernel, gpus: Gpus) -> None:
    for _ in range(2):
        cell = user.run("print(notebook_launcher(where))").ok()
        line, values = cell.stdout.splitlines()
        assert f"on {gpus.type.upper()}, forkserver ({gpus.in_use})" in line
        assert values == str(expected(gpus))


def test_asking_for_a_fork_after_a_gpu_was_used_is_refused_with_what_to_write(user: Kernel) -> None:
    cell = user.run("notebook_launcher(where, start_method='fork')")
    assert cell.error == "ConfigError"
    assert "need no restart" in cell.message


def test_more_ranks_than_gpus_are_refused_and_the_cpu_can_be_asked_for(notebook: Kernel, gpus: Gpus) -> None:
    cell = notebook.run(f"notebook_launcher(where, (), {gpus.count + 1})")
    assert cell.error == "ConfigError"
    assert "rank needs its own" in cell.message
    cell = notebook.run("print(notebook_launcher(where, (), 2, devices='cpu'))").ok()
    assert eval(cell.stdout.splitlines()[1]) == [("cpu", 2, 2.0)] * 2


def test_a_tensor_on_a_device_comes_back_on_the_cpu_and_the_gpu_stays_untouched(notebook: Kernel, gpus: Gpus) -> None:
    cell = notebook.run(f"print(notebook_launcher(lambda: torch.ones(3, device='{gpus.type}'), (), 1))").ok()
    assert cell.stdout.splitlines()[1] == "[tensor([1., 1., 1.])]"
    assert is_untouched(notebook, gpus)


def memory_in_use() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@pytest.mark.parametrize("how", ["raise ValueError('x')", "import os; os._exit(1)"])
def test_a_rank_that_fails_gives_its_gpu_memory_back(notebook: Kernel, how: str) -> None:
    torch.cuda.init()
    before: Any = memory_in_use()
    notebook.run(f"def fills():\n    x = torch.ones(1 << 26, device='cuda')\n    {how}").ok()
    assert notebook.run("notebook_launcher(fills, (), 1)").error is not None
    assert memory_in_use() - before < 64 << 20
