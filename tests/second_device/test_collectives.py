"""simccl between ranks: the numbers of gloo, when NCCL would have them."""

from __future__ import annotations

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
