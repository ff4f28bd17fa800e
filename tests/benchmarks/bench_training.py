"""What the framework adds to a training step, alone and on two ranks, against loops written by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import pin, ratio_of_sums

from nb_accelerate import notebook_launcher

STEPS = 200
ROUNDS = 40
TURN = 10
SHARDED_ROUNDS = 8
SHARDED_STEPS = 40


def _parts(width: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)


def _loop(accelerator: Any, width: int, inputs: torch.Tensor) -> Callable[[], None]:
    """A loop of either framework, over batches that exist already."""
    model, optimizer, scheduler = accelerator.prepare(*_parts(width))

    def run() -> None:
        for _ in range(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return run


def _by_hand(width: int, inputs: torch.Tensor) -> Callable[[], None]:
    model, optimizer, scheduler = _parts(width)

    def run() -> None:
        for _ in range(STEPS):
            model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return run


def _alone() -> list[str]:
    from accelerate import Accelerator as Theirs

    from nb_accelerate import Accelerator

    inputs = torch.ones(2, 4)
    actions = {
        "hand": _by_hand(4, inputs),
        "ours": _loop(Accelerator(cpu=True), 4, inputs),
        "theirs": _loop(Theirs(cpu=True), 4, inputs),
    }
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(25):
        for name, action in actions.items():
            began = time.process_time()
            action()
            taken[name].append((time.process_time() - began) / STEPS)
    hand, ours, theirs = (1e6 * statistics.median(taken[name]) for name in actions)
    return [
        f"added to a step in one process  {(ours - hand) / (theirs - hand):5.2f} of accelerate  "
        f"({ours - hand:.1f} µs to {hand:.0f}, accelerate {theirs - hand:.1f})"
    ]


def _epochs(width: int, batch_size: int) -> dict[str, list[float]]:
    """CPU seconds for a step of whole epochs on this rank, one of each kind a round: loader, model, optimizer.

    In a round the loops take turns, a few steps each, as the machine's pace changes from second to second. Everything
    is made anew for each round: two loops that are alike differ by some percent with where their memory is.
    """
    from accelerate import Accelerator as Theirs
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DistributedSampler

    from nb_accelerate import Accelerator

    torch.set_num_threads(1)
    pin()
    rows = 2 * STEPS * batch_size
    data = TensorDataset(torch.ones(rows, width), torch.zeros(rows, 1))

    def prepared(accelerator: Any) -> Iterator[None]:
        model, optimizer, _ = _parts(width)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=batch_size, shuffle=True)
        )
        for number, (inputs, targets) in enumerate(loader):
            if number % TURN == 0:
                yield
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()

    def by_hand() -> Iterator[None]:
        model, optimizer, _ = _parts(width)
        model = DistributedDataParallel(model)
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True)
        loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
        for number, (inputs, targets) in enumerate(loader):
            if number % TURN == 0:
                yield
            inputs, targets = inputs.to("cpu"), targets.to("cpu")  # noqa: PLW2901 - as everybody writes it
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    ours, theirs = Accelerator(cpu=True), Theirs(cpu=True)

    def free() -> None:
        ours.free_memory()
        theirs.free_memory()

    kinds = {"hand": by_hand, "ours": lambda: prepared(ours), "theirs": lambda: prepared(theirs)}
    return _in_turns(kinds, free)


def _in_turns(
    kinds: Mapping[str, Callable[[], Iterator[None]]],
    after_round: Callable[[], None],
    rounds: int = ROUNDS,
    steps: int = STEPS,
) -> dict[str, list[float]]:
    """CPU seconds for a step of each kind of loop, one number a round. A loop yields before each `TURN` steps."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        loops = {name: make() for name, make in kinds.items()}
        for loop in loops.values():
            next(loop)  # makes everything, and reads the first batch
        for seconds in taken.values():
            seconds.append(0.0)
        for turn in range(steps // TURN):
            first = turn % len(loops)
            for name in list(loops)[first:] + list(loops)[:first]:  # nobody always comes after the same other
                began = time.process_time()
                next(loops[name], None)
                taken[name][-1] += (time.process_time() - began) / steps
        after_round()
    return taken


def _sharded() -> dict[str, list[float]]:
    """CPU seconds for a step of a sharded model on this rank: by hand, the same again, and ours."""
    from torch.distributed.fsdp import fully_shard

    from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.set_num_threads(1)
    pin()
    inputs = torch.ones(32, 512)

    def make() -> Any:
        blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], Any]) -> Iterator[None]:
        for number in range(SHARDED_STEPS):
            if number % TURN == 0:
                yield
            backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def by_hand() -> Iterator[None]:
        model, _ = make()
        for block in model:
            fully_shard(block)
        fully_shard(model)
        yield from train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), torch.Tensor.backward)

    ours = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())

    def prepared() -> Iterator[None]:
        yield from train(*ours.prepare(*make()), ours.backward)

    kinds = {"hand": by_hand, "again": by_hand, "ours": prepared}
    return _in_turns(kinds, ours.free_memory, rounds=SHARDED_ROUNDS, steps=SHARDED_STEPS)


def _sharded_on_two_ranks() -> list[str]:
    ranks = notebook_launcher(_sharded, num_processes=2, progress="off", timeout=300)
    hand, again, ours = (
        [sum(both) / 2 for both in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in ("hand", "again", "ours")
    )
    low, ratio, high = ratio_of_sums(ours, hand)
    _, same, _ = ratio_of_sums(again, hand)
    return [
        f"a step with FSDP2 on two ranks      {ratio:5.3f} of fully_shard by hand in CPU time  "
        f"(19 of 20 times in {low:.3f} to {high:.3f}; {1e3 * statistics.mean(ours):.2f} ms; another loop by hand "
        f"{same:.3f})"
    ]


def _on_two_ranks() -> list[str]:
    lines = []
    for name, width, batch_size in (("a small MLP", 32, 16), ("a wider one", 256, 64)):
        ranks = notebook_launcher(_epochs, (width, batch_size), num_processes=2, progress="off", timeout=300)
        hand, ours, theirs = (
            [sum(both) / 2 for both in zip(*(rank[kind] for rank in ranks), strict=True)]
            for kind in ("hand", "ours", "theirs")
        )
        low, ratio, high = ratio_of_sums(ours, hand)
        _, accelerate, _ = ratio_of_sums(theirs, hand)
        lines.append(
            f"a step on two ranks, {name:<12} {ratio:5.3f} of DDP by hand in CPU time  "
            f"(19 of 20 times in {low:.3f} to {high:.3f}; {1e6 * statistics.mean(ours):.0f} µs; "
            f"accelerate {accelerate:.3f})"
        )
    return lines


def _times_of_phases(width: int, batch_size: int) -> tuple[float, float]:
    """Seconds of a step on this rank, and those of them in which it is noted where the time goes."""
    from nb_accelerate import Accelerator
    from nb_accelerate.base.progress_page import Phase, here
    from nb_accelerate.training.accelerator.losses import time_exchange

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.ones(2 * STEPS * batch_size, width), torch.zeros(2 * STEPS * batch_size, 1))
    model, optimizer, _ = _parts(width)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))
    steps, began = [], time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        steps.append(-began + (began := time.perf_counter()))

    page, weight = here(), torch.ones(1, requires_grad=True)

    def phases() -> None:
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.RUNNING, Phase.STEP, Phase.RUNNING):
            page.enter(phase)

    def backward() -> None:
        weight.sum().backward()

    def timed_backward() -> None:
        loss = weight.sum()
        time_exchange(loss, page)
        loss.backward()

    page.enter(Phase.BACKWARD)
    taken: dict[str, list[float]] = {"phases": [], "backward": [], "timed": []}
    for _ in range(3000):
        for name, action in zip(taken, (phases, backward, timed_backward), strict=True):
            began = time.perf_counter()
            action()
            taken[name].append(time.perf_counter() - began)
        page.enter(Phase.BACKWARD)
    phase_seconds, plain, timed = (statistics.median(taken[name]) for name in taken)
    return statistics.median(steps), phase_seconds + timed - plain


def _where_the_time_goes() -> list[str]:
    lines = []
    for name, width, batch_size in (("a small MLP", 32, 16), ("a wider one", 1024, 64)):
        ranks = notebook_launcher(_times_of_phases, (width, batch_size), num_processes=2, progress="off", timeout=300)
        step, added = (statistics.mean(one) for one in zip(*ranks, strict=True))
        lines.append(
            f"noting where the time goes, {name:<12} {100 * added / step:5.2f} % of a step  "
            f"({1e6 * added:.1f} µs of {1e6 * step:.0f})"
        )
    return lines


def measure() -> list[str]:
    return [*_alone(), *_on_two_ranks(), *_where_the_time_goes(), *_sharded_on_two_ranks()]
