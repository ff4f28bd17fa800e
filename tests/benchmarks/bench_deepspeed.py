"""What is added to a step of a DeepSpeed engine, on two ranks: `make bench-deepspeed`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from turns import pin, ratio_of_sums

from nb_accelerate import notebook_launcher

ROUNDS = 12
STEPS = 10
WIDTH = 256
LAYERS = 4
ROWS = 64


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))


def _steps(stage: int) -> dict[str, list[float]]:
    """CPU seconds for a step on this rank, of each kind and round: a bare engine, the same again, and ours.

    Loops take turns of a few steps. Two bare engines say how far apart two equal loops are here.
    """
    from nb_accelerate import Accelerator, DeepSpeedPlugin

    torch.set_num_threads(1)
    pin()
    config = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(dict(config)))
    import deepspeed

    inputs = torch.ones(ROWS, WIDTH)

    def ours() -> Iterator[None]:
        model = _model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        while True:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            yield

    def bare() -> Iterator[None]:
        model = _model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters()),
            config={**config, "train_micro_batch_size_per_gpu": 1},
        )
        while True:
            engine.backward(engine(inputs).square().mean())
            engine.step()
            yield

    kinds: dict[str, Callable[[], Iterator[None]]] = {"bare": bare, "again": bare, "ours": ours}
    loops = {name: make() for name, make in kinds.items()}
    for loop in loops.values():
        for _ in range(5):
            next(loop)  # makes everything, and what the first steps make
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(ROUNDS):
        order = list(loops)[number % 3 :] + list(loops)[: number % 3]  # nobody always comes after the same other
        for name in order:
            began = time.process_time()
            for _ in range(STEPS):
                next(loops[name])
            taken[name].append((time.process_time() - began) / STEPS)
    return taken


def _line(stage: int) -> str:
    ranks: list[Any] = notebook_launcher(_steps, (stage,), num_processes=2, progress="off", timeout=300)
    bare, again, ours = (
        [sum(both) / 2 for both in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in ("bare", "again", "ours")
    )
    low, ratio, high = ratio_of_sums(ours, bare)
    _, same, _ = ratio_of_sums(again, bare)
    return (
        f"a step of ZeRO stage {stage} on two ranks  {ratio:5.3f} of a bare engine in CPU time  "
        f"(19 of 20 times in {low:.3f} to {high:.3f}; {1e3 * statistics.mean(ours):.1f} ms; "
        f"another bare engine {same:.3f})"
    )


def measure() -> list[str]:
    if find_spec("deepspeed") is None:
        return ["DeepSpeed is not installed here: run `make bench-deepspeed`"]
    return [_line(stage) for stage in (1, 2, 3)]
