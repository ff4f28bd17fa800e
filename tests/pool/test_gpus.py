"""Ranks that stay, on GPUs: collectives run ahead of the cells that ask for them.

`tests/second_device/test_cells.py` runs these tests on devices that are made of host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.devices import Gpus
from fixtures.kernels import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.limit(180)]

SETUP = """
%load_ext nb_accelerate
import torch
import torch.distributed as dist
"""

IN_STEP = """%%distributed --out seen
total = torch.ones(1, device=device)
dist.all_reduce(total)
loss = model(torch.ones(1, 2, device=device)).sum()
loss.backward()
(kept, int(total.item()), round(loss.item(), 4))
"""


@pytest.fixture(scope="module")
def notebook(gpus: Gpus, shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run("%distributed start").ok()
    shared_kernel.run("%%distributed\nkept = rank\nmodel = accelerator.prepare(torch.nn.Linear(2, 1))").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def seen(notebook: Kernel) -> list[tuple[int, int, float]]:
    notebook.run(IN_STEP).ok()
    cell = notebook.run("print(seen)").ok()
    return list(eval(cell.stdout))


def test_every_gpu_has_a_rank_with_a_group_even_if_it_is_alone(notebook: Kernel, gpus: Gpus) -> None:
    notebook.run("%%distributed --out names\ndist.barrier()\n(str(device), dist.get_backend())").ok()
    expected = [(name, gpus.backend) for name in gpus.names]
    assert notebook.run("print(names)").ok().stdout.strip() == str(expected)


@pytest.mark.parametrize(
    "cell",
    [
        # Rank 0 waits for the device, and the device for nothing, until its communicator is aborted.
        "if rank == 0:\n    dist.all_reduce(total)\n    print(total.item())\nelse:\n    raise KeyError('mine')",
        # Nobody waits: the cell ends well, and the device of rank 0 does not.
        "if rank == 0:\n    dist.all_reduce(total)",
    ],
    ids=["a rank that fails", "a cell that ends well"],
)
def test_ranks_that_came_apart_meet_again_with_their_variables_and_models(
    notebook: Kernel, gpus: Gpus, cell: str
) -> None:
    if gpus.count < 2:
        pytest.skip("needs two devices")
    before = seen(notebook)
    notebook.run(f"%%distributed\n{cell}")
    again = notebook.run(IN_STEP).ok()
    assert "group was made again" in str(again.displays)
    assert seen(notebook) == before
