"""Runs that save, are killed, and go on: the program of the tests and of `make soak`.

Each line that it reads is a run: a JSON list of the folder, the number of ranks, how often it saves, the pause after
each step in seconds, whether it saves in the background, and whether it goes on from what is there.

The clock by which checkpoints are dated goes back and forth.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from nb_accelerate import notebook_launcher

EPOCHS = 3


def train(where: str, every: str, in_background: bool, pause: float, ranks: int) -> str:
    """Train, and return a fingerprint of everything that a run has at its end."""
    import torch
    from torch import nn

    from nb_accelerate import Accelerator
    from nb_accelerate.utils import ProjectConfiguration

    _set_clock()
    torch.manual_seed(3)
    project = ProjectConfiguration(where, save_every=every, total_limit=2, async_save=in_background)
    accelerator = Accelerator(cpu=True, project_config=project, gradient_accumulation_steps=2)
    rank = accelerator.process_index
    generator = torch.Generator().manual_seed(7)
    data = torch.utils.data.TensorDataset(torch.arange(64), torch.randn(64, 3, generator=generator))
    model: Any = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8 // ranks, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(100 + rank)  # what dropout draws differs over ranks
    Path(where).mkdir(parents=True, exist_ok=True)
    Path(where, f"rank {rank}").write_text(f"{os.getpid()}\n")
    with Path(where, f"log {rank}").open("a") as log:
        for epoch, batches in accelerator.resumable(loader, EPOCHS):
            for rows, inputs in batches:
                with accelerator.accumulate(model):
                    loss = model(inputs).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                accelerator.log({"loss": loss.item()})
                step = accelerator.core.registry.progress.global_step
                # A step that was lost is done again: the last line of a step counts.
                log.write(json.dumps([step, rows.tolist(), loss.item()]) + "\n")
                log.flush()
                time.sleep(pause)
            log.write(json.dumps([-1 - epoch, [], torch.rand(1).item()]) + "\n")
            log.flush()
    end = hashlib.sha256()
    state = optimizer.state_dict()["state"]
    for tensor in (*model.state_dict().values(), *(one for part in state.values() for one in part.values())):
        end.update(tensor.numpy().tobytes())
    end.update(torch.get_rng_state().numpy().tobytes())
    return end.hexdigest()


def _set_clock() -> None:
    """Have checkpoints of attempts be dated an hour early and an hour late, in turn."""
    from nb_accelerate.training.checkpoint import manifest

    hours = 1 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) % 2 else -1

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(hours=hours)

    manifest.datetime = Clock


def main() -> None:
    """Run once for each line, and print the fingerprints of all ranks as a line."""
    for line in sys.stdin:
        where, ranks, every, pause, in_background, resume = json.loads(line)
        ends = notebook_launcher(
            train,
            (where, every, in_background, pause, ranks),
            ranks,
            start_method="forkserver",
            progress="off",
            max_restarts=100,
            resume=resume,
        )
        print(json.dumps(list(ends)), flush=True)


if __name__ == "__main__":
    main()
