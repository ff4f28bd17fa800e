"""What the end of a real run says about it, on two ranks with a known fault each."""

from __future__ import annotations

import pytest

from nb_accelerate import notebook_launcher

pytestmark = pytest.mark.slow


def train(*, slow_loader: int = -1, slow_rank: int = -1, width: int = 64, seconds: float = 7.0) -> None:
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def collate(rows: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        time.sleep(0.04 if rank == slow_loader else 0.0)
        return torch.stack([row[0] for row in rows])

    loader = DataLoader(TensorDataset(torch.ones(80_000, 16)), batch_size=4, collate_fn=collate)
    model = nn.Sequential(nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    until = None
    for batch in loader:
        time.sleep(0.04 if rank == slow_rank else 0.0)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        until = until or time.monotonic() + seconds
        if accelerator.reduce(torch.tensor(float(time.monotonic() > until))):
            break


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"slow_loader": 1},
            ("Rank 0 waited", "for rank 1 (slower at loading data), so that", "Try num_workers="),
        ),
        ({"slow_rank": 0}, ("Rank 1 waited", "for rank 0 (more work between steps), so that")),
        ({"width": 1500}, ("Every rank waited", "for the exchange of gradients, so that", ". Try a larger batch")),
    ],
)
def test_the_fault_is_named(fault: dict[str, int], said: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(train, num_processes=2, kwargs=fault, progress="text")
    last = capfd.readouterr().err.splitlines()[-1]
    assert ", so that 2 ranks did the work of " in last
    for part in said:
        assert part in last
