"""The checks of `nb-accelerate test`, which run on every rank at the same time.

A check raises if something is wrong, or returns what it measured. Expected values are computed without this package.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.training.accelerator import Accelerator

# Largest difference of weights after training, by precision: sums are taken in another order.
_TOLERANCE = {"no": 1e-5, "bf16": 0.05, "fp16": 0.05, "fp8": 0.05}


class CheckFailed(Exception):  # noqa: N818 - what it says, and not an error of this package
    """A check failed; the text names it."""


def run_checks() -> int:
    """Run all checks; the main process prints a line for each. Returns how many there are."""
    from nb_accelerate.training.accelerator import Accelerator

    accelerator = Accelerator()
    for name, check in CHECKS.items():
        try:
            seen = check(accelerator)
        except Exception as error:
            raise CheckFailed(f"{name}: {str(error) or type(error).__name__}") from error
        accelerator.print(f"ok  {name:<12} {seen}", flush=True)
    return len(CHECKS)


def _check_ranks(accelerator: Accelerator) -> str:
    from nb_accelerate.utils.operations import gather_object

    mine = (accelerator.process_index, str(accelerator.device))
    answers = gather_object([mine])
    ranks = [rank for rank, _ in answers]
    _expect("the ranks that answered", ranks, [*range(accelerator.num_processes)])
    return f"{len(ranks)} on {', '.join(dict.fromkeys(device for _, device in answers))}"


def _check_collectives(accelerator: Accelerator) -> str:
    import torch

    from nb_accelerate.utils.operations import broadcast

    rank, number = accelerator.process_index, accelerator.num_processes
    mine = torch.full((2,), float(rank), device=accelerator.device)
    _expect("gather", accelerator.gather(mine).tolist(), [float(rank) for rank in range(number) for _ in range(2)])
    _expect("reduce", accelerator.reduce(mine, "sum").tolist(), [float(sum(range(number)))] * 2)
    _expect("broadcast", broadcast(mine + 1, from_process=number - 1).tolist(), [float(number)] * 2)
    uneven = torch.ones(rank + 1, device=accelerator.device)
    _expect("pad", accelerator.pad_across_processes(uneven).shape[0], number)
    accelerator.wait_for_everyone()
    return "gather, reduce, broadcast, pad, barrier"


def _check_loaders(accelerator: Accelerator) -> str:
    from torch.utils.data import DataLoader

    rows = [*range(8 * accelerator.num_processes + 3)]
    seen = {}
    for shuffle in (False, True):
        loader = accelerator.prepare(DataLoader(rows, batch_size=4, shuffle=shuffle))  # type: ignore[arg-type]
        seen[shuffle] = [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
    _expect("rows in order", seen[False], rows)
    _expect("shuffled rows, each once", sorted(seen[True]), rows)
    return f"{len(rows)} rows, each once, in order and shuffled"


def _check_training(accelerator: Accelerator) -> str:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    number, steps, batch = accelerator.num_processes, 8, 4
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(steps * batch * number, 6, generator=generator)
    targets = inputs.sum(dim=1, keepdim=True)

    def make() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    model, optimizer, loader = accelerator.prepare(
        *make(), DataLoader(TensorDataset(inputs, targets), batch_size=batch)
    )
    for some_inputs, some_targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(some_inputs), some_targets))
        optimizer.step()

    alone, optimizer = make()
    for step in range(steps):  # one process sees in each step what all of them see together
        of_step = slice(step * batch * number, (step + 1) * batch * number)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(alone(inputs[of_step]), targets[of_step]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    trained = accelerator.unwrap_model(model).state_dict()
    difference = max(float((trained[name].cpu() - value).abs().max()) for name, value in alone.state_dict().items())
    allowed = _TOLERANCE[accelerator.mixed_precision]
    if not difference <= allowed:
        raise CheckFailed(f"weights differ by {difference:.2g} from those of one process, more than {allowed:g}")
    return f"{steps} steps, weights within {difference:.1g} of those of one process"


def _check_checkpoint(accelerator: Accelerator) -> str:
    import torch

    from nb_accelerate.utils.operations import broadcast_object_list

    model = accelerator.prepare(torch.nn.Linear(3, 2))
    folder: list[Any] = [None]
    with tempfile.TemporaryDirectory(prefix="nb-accelerate-test-") as mine:
        folder[0] = mine
        shared = Path(broadcast_object_list(folder)[0]) / "checkpoint"
        saved = [parameter.detach().clone() for parameter in model.parameters()]
        accelerator.save_state(str(shared))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(shared))
        loaded = [parameter.detach() for parameter in model.parameters()]
        accelerator.wait_for_everyone()  # before the folder goes
    if not all(map(torch.equal, saved, loaded)):
        raise CheckFailed("the loaded weights differ from the saved ones")
    return "saved and loaded"


def _expect(what: str, seen: object, expected: object) -> None:
    if seen != expected:
        raise CheckFailed(f"{what}: {seen}, expected {expected}")


CHECKS: dict[str, Callable[[Accelerator], str]] = {
    "ranks": _check_ranks,
    "collectives": _check_collectives,
    "loaders": _check_loaders,
    "training": _check_training,
    "checkpoint": _check_checkpoint,
}
