"""What a notebook that computes on a device itself sends to ranks: variables, and the seeds of its random numbers."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel
from second_device.test_cells import on_ranks

pytestmark = pytest.mark.usefixtures("simgpu")

SETUP = """
%load_ext nb_accelerate
import torch
torch.manual_seed(1)
data = torch.arange(4.0, device="simgpu:1")
tail = data[2:]
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to("simgpu")
net[1].weight = net[0].weight
net[0].weight.data.fill_(3.0)
optimizer = torch.optim.Adam(net.parameters())
net(torch.ones(1, 2, device="simgpu")).sum().backward()
optimizer.step()
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.run(SETUP).ok()
    said = shared_kernel.run("%%distributed\nimport torch").ok().stdout
    assert said == "2 processes on SIMGPU\n"
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def test_tensors_and_models_on_any_device_arrive_on_the_cpu_and_share_what_they_shared(notebook: Kernel):
    weights = literal_eval(notebook.run("print(net[0].weight.tolist())").ok().stdout)
    code = "data[3] = 7.0\nplaced = {str(one.device) for one in (data, tail, *net.parameters())}"
    value = "placed, tail.tolist(), net[0].weight is net[1].weight, net[1].weight.tolist()"
    assert on_ranks(notebook, code, value) == [({"cpu"}, [2.0, 7.0], True, weights)] * 2
    assert on_ranks(notebook, "", "data.to(device).sum().item()") == [10.0] * 2
    notebook.run("%distributed push data").ok()
    assert on_ranks(notebook, "", "data.tolist()") == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert notebook.run("print(data.device, tail.tolist())").ok().stdout == "simgpu:1 [2.0, 3.0]\n"


def test_a_trained_model_and_its_optimizer_go_on_on_the_devices_of_the_ranks(notebook: Kernel):
    code = (
        "prepared, prepared_optimizer = accelerator.prepare(net, optimizer)\n"
        "accelerator.backward(prepared(torch.ones(1, 2, device=device)).sum())\nprepared_optimizer.step()\n"
        "moments = [one for state in prepared_optimizer.state.values() for one in state.values() if one.dim()]"
    )
    value = "{str(one.device) for one in (*prepared.parameters(), *moments)}, len(moments)"
    assert on_ranks(notebook, code, value) == [({"simgpu:0"}, 6), ({"simgpu:1"}, 6)]


def test_numbers_drawn_on_devices_follow_the_seed_of_the_notebook(notebook: Kernel):
    draw = "torch.rand(3, device='simgpu').tolist()"
    drawn = []
    for seed in (3, 4):
        notebook.run(f"torch.manual_seed({seed});").ok()
        of_ranks = on_ranks(notebook, "", draw)
        assert of_ranks == [literal_eval(notebook.run(f"print({draw})").ok().stdout)] * 2
        drawn += of_ranks[:1]
    assert drawn[0] != drawn[1]
