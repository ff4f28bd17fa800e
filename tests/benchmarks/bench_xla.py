"""What the framework adds to a loop of torch_xla alone, on the CPU device of its runtime, in one run.

torch_xla belongs to an older torch than the rest is measured with, so this needs the environment of `make test-xla`.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from turns import ratio_of_sums

BATCHES = 100
ROUNDS = 20
COMMAND = "PJRT_DEVICE=CPU PYTHONPATH=. .venv-xla/bin/python tests/benchmarks/run.py xla"


def _data(width: int, batch_size: int) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.ones(BATCHES * batch_size, width), torch.zeros(BATCHES * batch_size, 1))


def _parts(width: int) -> tuple[Any, Any]:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _their_loader(data: Any, batch_size: int) -> Any:
    from torch.utils.data import DataLoader
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    return MpDeviceLoader(DataLoader(data, batch_size=batch_size), "xla:0")


def _bare(width: int, batch_size: int) -> Callable[[], None]:
    import torch
    from torch import nn

    model, _ = _parts(width)
    model = model.to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loader = _their_loader(_data(width, batch_size), batch_size)

    def epoch() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    return epoch


def _prepared(width: int, batch_size: int) -> Callable[[], None]:
    from torch import nn
    from torch.utils.data import DataLoader

    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(
        *_parts(width), DataLoader(_data(width, batch_size), batch_size=batch_size)
    )

    def epoch() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()

    return epoch


def _loaders(width: int, batch_size: int) -> dict[str, Callable[[], None]]:
    from torch.utils.data import DataLoader

    from nb_accelerate import Accelerator

    data = _data(width, batch_size)
    theirs = _their_loader(data, batch_size)
    ours = Accelerator().prepare(DataLoader(data, batch_size=batch_size))

    def through(loader: Any) -> Callable[[], None]:
        def read() -> None:
            for _ in loader:
                pass

        return read

    return {"bare": through(theirs), "ours": through(ours)}


def _compare(actions: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """CPU seconds for a batch of whole epochs, that the device has finished, in turns: the device is the CPU."""
    import torch_xla.core.xla_model as xm

    taken: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(ROUNDS + 2):  # the first two compile
        for name in list(actions) if turn % 2 else reversed(list(actions)):
            began = time.process_time()
            actions[name]()
            xm.wait_device_ops()
            if turn > 1:
                taken[name].append((time.process_time() - began) / BATCHES)
    return taken


def _lines() -> Iterator[str]:
    import torch
    import torch_xla  # noqa: F401 - makes the device known to torch

    # As in ranks that are forked. Threads of OpenMP that wait for batches to collate burn the cores that the device
    # computes on, and only in one of the loops: they give up early where there are more threads than cores, and
    # MpDeviceLoader starts some.
    torch.set_num_threads(1)
    cases: list[tuple[str, dict[str, Callable[[], None]]]] = []
    for name, width, batch_size in (("a small MLP", 64, 16), ("a wider one", 512, 128)):
        cases.append((f"a step, {name}", {"bare": _bare(width, batch_size), "ours": _prepared(width, batch_size)}))
    cases.append(("a batch of a loader", _loaders(64, 16)))
    for name, actions in cases:
        taken = _compare(actions)
        low, ratio, high = ratio_of_sums(taken["ours"], taken["bare"])
        yield (
            f"{name:<20} {ratio:5.3f} of torch_xla with MpDeviceLoader in CPU time  "
            f"(19 of 20 times in {low:.3f} to {high:.3f}; {1e6 * statistics.median(taken['ours']):.0f} µs)"
        )


def measure() -> Iterator[str]:
    """Yield lines of the table, or the one that says what is missing."""
    if importlib.util.find_spec("torch_xla") is None:
        yield f"needs torch_xla; after make test-xla: {COMMAND}"
        return
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    yield from _lines()
