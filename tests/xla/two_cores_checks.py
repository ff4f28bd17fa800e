"""What each of two ranks does, for `test_two_cores.py`: it raises if something is wrong."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate import Accelerator

ROWS = 7


def data() -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * ROWS).view(ROWS, 2) / ROWS, torch.arange(1.0 * ROWS))


def linear() -> nn.Module:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25]]))
        model.bias.zero_()
    return model


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs).squeeze(-1) - targets).square().mean()


def gathers_seven_rows(rank: int) -> None:
    accelerator = Accelerator()
    assert (accelerator.process_index, accelerator.num_processes) == (rank, 2)
    assert accelerator.local_process_index == rank
    assert accelerator.device == torch.device("xla", rank)
    loader = accelerator.prepare(DataLoader(data(), batch_size=2))
    seen = []
    for _, targets in loader:
        seen += accelerator.gather_for_metrics(targets).tolist()
    assert seen == [float(row) for row in range(ROWS)], seen
    assert accelerator.gather_for_metrics([f"of {rank}"], use_gather_object=True) == ["of 0", "of 1"]
    assert accelerator.reduce(torch.tensor(1.0 + rank, device=accelerator.device), "mean").item() == 1.5


def averages_gradients_once(rank: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = linear()
    if rank:
        with torch.no_grad():
            model.weight.fill_(9.0)  # that of rank 0 counts
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    plain = linear()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = (one[:6].split(3) for one in data().tensors)  # three rows for each rank, in two batches
    for _ in range(3):
        for rows in (slice(0, 1), slice(1, 3)):
            with accelerator.accumulate(model):
                mine = inputs[rank][rows].to(accelerator.device), targets[rank][rows].to(accelerator.device)
                accelerator.backward(loss_of(model, *mine))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        parts = [(of, rows) for of in (0, 1) for rows in (slice(0, 1), slice(1, 3))]
        losses = [loss_of(plain, inputs[of][rows], targets[of][rows]) for of, rows in parts]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(model.weight.detach().cpu(), plain.weight.detach())


def shuffles_as_one(rank: int) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(data(), batch_size=1, shuffle=True))
    for _ in range(2):
        seen = []
        for _, targets in loader:
            seen += accelerator.gather_for_metrics(targets).tolist()
        assert sorted(seen) == [float(row) for row in range(ROWS)], seen


if __name__ == "__main__":
    import two_cores

    two_cores.run(sys.argv[1])
