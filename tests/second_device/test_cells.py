"""Cells on two devices: those of `pool/test_gpus.py`, and what travels between kernel and ranks."""

from __future__ import annotations

from ast import literal_eval

import pytest
from fixtures.kernels import Kernel
from pool.test_gpus import (  # noqa: F401
    notebook,
    test_every_gpu_has_a_rank_with_a_group_even_if_it_is_alone,
    test_ranks_that_came_apart_meet_again_with_their_variables_and_models,
)

pytestmark = pytest.mark.usefixtures("simgpu")


@pytest.fixture(scope="module")
def cells(notebook: Kernel) -> Kernel:  # noqa: F811
    """A kernel that has not used a device, with a rank on each."""
    notebook.run("%%distributed\nimport torch\nown = torch.rand(4, device=device) + rank").ok()
    return notebook


def on_ranks(cells: Kernel, code: str, value: str) -> list[object]:
    """What an expression is worth on each rank when a cell has run there."""
    cells.run(f"%%distributed --quiet --out value_of_ranks\n{code}\n{value}").ok()
    return list(literal_eval(cells.run("print(value_of_ranks)").ok().stdout))


def test_tensors_of_a_cell_are_on_the_device_of_their_rank(cells: Kernel):
    code = (
        "unnumbered = torch.ones(1, device='simgpu')\nmodel = accelerator.prepare(torch.nn.Linear(1, 1))\n"
        "placed = [own, unnumbered, *model.parameters()]"
    )
    value = "{str(one.device) for one in (*placed, accelerator)}, torch.simgpu.current_device()"
    assert on_ranks(cells, code, value) == [({"simgpu:0"}, 0), ({"simgpu:1"}, 1)]


def test_what_is_pulled_is_on_the_cpu_and_the_notebook_stays_off_its_devices(cells: Kernel):
    cells.run("%%distributed\nnets = [torch.nn.Linear(2, 2).to(device)]\nnets[0].weight.data.fill_(rank)").ok()
    cells.run("%distributed pull own nets --all").ok()
    found = cells.run("print([one.device.type for one in (own[0], own[1], nets[0][0].weight, nets[1][0].weight)])").ok()
    assert found.stdout == "['cpu', 'cpu', 'cpu', 'cpu']\n"
    assert cells.run("[int(net[0].weight.sum()) for net in nets]").ok().value == "[0, 4]"
    assert on_ranks(cells, "", "str(nets[0].weight.device), own.tolist()") == [
        (f"simgpu:{rank}", literal_eval(cells.run(f"own[{rank}].tolist()").ok().value)) for rank in (0, 1)
    ]
    assert cells.run("torch.simgpu.is_initialized()").ok().value == "False"


def test_the_memory_of_each_rank_is_that_of_its_own_device(cells: Kernel):
    # Nothing in the loop waits for the device, and every step reports: a loss that is read too early is not a number.
    code = (
        "from nb_accelerate.base.progress_page import here\nfrom nb_accelerate.training.accelerator import losses\n"
        "losses._REPORT_SECONDS = 0.0\nheld = torch.empty((rank + 1) << 26, dtype=torch.uint8, device=device)\n"
        "net = torch.nn.Linear(64, 1 << 14)\nbatch, seen = torch.ones(2, 64, device=device), []\n"
        "net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))\n"
        "for _ in range(10):\n    loss = net(batch).square().mean()\n    accelerator.backward(loss)\n"
        "    optimizer.step()\n    seen.append(loss.detach())\n"
        "del batch, loss\nhere().measure()"
    )
    value = "torch.simgpu.memory_allocated(), torch.simgpu.max_memory_allocated(), torch.stack(seen).tolist()"
    measured = on_ranks(cells, code, value)
    cells.run("import nb_accelerate; ranks = nb_accelerate.pool.current().group.ranks").ok()
    for rank, (allocated, peak, losses) in enumerate(measured):
        cells.run(f"page = ranks[{rank}].handle.page.read(); held = page.held").ok()
        percent, memory, loss = literal_eval(cells.run("page.utilisation, page.memory, page.loss").ok().value)
        values = "held.used, held.peak, held.limit, held.parameters, held.optimizer"
        used, most, limit, parameters, optimizer = literal_eval(cells.run(values).ok().value)
        assert percent == 0, "it was asked, and has no meter"
        assert parameters == pytest.approx(4 * 65 << 14, rel=0.01)
        assert optimizer == pytest.approx(2 * parameters, rel=0.01)
        assert (rank + 1) << 26 < used <= most <= peak < (rank + 2) << 26 < limit == 2 << 30
        assert memory == pytest.approx(allocated, rel=0.2)
        assert loss == pytest.approx(min(losses, key=lambda one: abs(one - loss)))
    said = cells.run("%distributed status").ok().stdout
    assert "simgpu:0" in said
    assert "simgpu:1" in said


def test_what_did_not_fit_is_free_when_the_next_cell_begins_and_the_debugger_sees_it_before(cells: Kernel):
    held = "%%rank 1 --quiet --out held_on_rank\ntorch.simgpu.memory_allocated()"
    cells.run(
        "%%distributed\ndef fill(mebibytes):\n"
        "    kept = torch.empty(mebibytes << 20, dtype=torch.uint8, device=device)\n"
        "    return len(kept) + len(torch.empty(1 << 30, dtype=torch.uint8, device=device))"
    ).ok()
    cells.run(held).ok()
    before = cells.run("print(held_on_rank)").ok().stdout
    failed = cells.run("%%rank 1\nfill(1200)")
    assert failed.error == "OutOfMemoryError"
    cells.run(held).ok()
    assert cells.run("print(held_on_rank)").ok().stdout == before
    cells.run("%%rank 1\nfill(500)").ok()
    assert cells.run("%%rank 1\nfill(1200)").error == "OutOfMemoryError"
    assert "1200" in cells.run("%%rank 1\n%debug", answers=["mebibytes", "q"]).ok().stdout
