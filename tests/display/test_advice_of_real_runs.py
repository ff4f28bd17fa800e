"""What the end of a real run says about it, on two ranks of which one loads slowly."""

from __future__ import annotations

import re

import pytest

from nb_accelerate import notebook_launcher

pytestmark = pytest.mark.slow


def train(seconds: float = 7.0) -> None:
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index

    def collate(rows: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        time.sleep(0.04 if rank == 1 else 0.0)
        return torch.stack([row[0] for row in rows])

    loader = DataLoader(TensorDataset(torch.ones(80_000, 16)), batch_size=4, collate_fn=collate)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    until = None
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        until = until or time.monotonic() + seconds
        if accelerator.reduce(torch.tensor(float(time.monotonic() > until))):
            break


def test_a_rank_that_loads_slowly_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    notebook_launcher(train, num_processes=2, progress="text")
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.match(r"Rank 1 .*loading data.*num_workers=", last)
