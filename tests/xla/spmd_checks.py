"""Train with a model that is sharded over four devices, save it, and read it again. Raises if something is wrong."""

import copy
import os
import sys
from pathlib import Path

os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}

import torch
import torch_xla
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_xla import runtime
from torch_xla.debug import metrics

from nb_accelerate import Accelerator

ROWS = TensorDataset(torch.randint(0, 20, (32, 5), generator=torch.Generator().manual_seed(1)))


def language_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model.add_module("output", nn.Linear(3, 7))  # too small to be cut
    return model


def cuts(tensors: list[torch.Tensor]) -> list[str]:
    return [torch_xla._XLAC._get_xla_sharding_spec(one) for one in tensors]


def main(folder: str) -> None:
    runtime.use_spmd()
    torch.manual_seed(0)
    model = language_model()
    plain = copy.deepcopy(model)
    accelerator = Accelerator()
    assert accelerator.num_processes == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ROWS, batch_size=8))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for (tokens,) in loader:
        accelerator.backward(model(tokens).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        assert cuts([tokens]) == ["{devices=[4,1]0,1,2,3}"]
    compiled = metrics.counter_value("UncachedCompile")
    for (tokens,) in DataLoader(ROWS, batch_size=8):
        plain(tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        theirs.step()
        theirs.zero_grad()
    of_weights = [f"{{devices={shape}0,1,2,3}}" for shape in ("[4,1]", "[4,1]", "[4]", "[1,4]")]
    assert cuts(list(model.parameters()))[:4] == of_weights, cuts(list(model.parameters()))
    assert cuts([state["exp_avg"] for state in optimizer.state.values()])[:4] == of_weights
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), other.detach(), atol=1e-5, rtol=0)
    accelerator.save_state(Path(folder) / "state")
    before = [one.detach().cpu().clone() for one in model.parameters()]
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    accelerator.load_state(Path(folder) / "state")
    assert all(torch.equal(one.cpu(), old) for one, old in zip(model.parameters(), before, strict=True))
    for (tokens,) in loader:
        accelerator.backward(model(tokens).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert cuts(list(model.parameters()))[:4] == of_weights, cuts(list(model.parameters()))
    assert compiled <= 6, compiled


if __name__ == "__main__":
    main(sys.argv[1])
