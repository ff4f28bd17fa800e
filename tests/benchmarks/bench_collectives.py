"""gather, reduce, broadcast and pad of 8 small tensors on two ranks, against one bare collective, and accelerate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nb_accelerate import notebook_launcher

ROUNDS = 300


def _on_ranks() -> dict[str, dict[str, float]]:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator as Theirs
    from accelerate.utils import broadcast as their_broadcast
    from turns import medians

    from nb_accelerate import Accelerator
    from nb_accelerate.training.comm.operations import broadcast

    torch.set_num_threads(1)
    ours, theirs = Accelerator(cpu=True), Theirs(cpu=True)
    collectives = ours.core.collectives
    one = torch.ones(16)
    whole = torch.empty(32)
    equal = {f"tensor {number}": torch.ones(4, 4) for number in range(8)}
    mixed: dict[str, Any] = {
        f"tensor {number}": torch.ones(4).to(kind)
        for number, kind in enumerate([torch.float32, torch.int64, torch.bool, torch.bfloat16] * 2)
    }
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    subjects: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object]]] = {
        "gather": (lambda: gather(whole, one), lambda: ours.gather(equal), lambda: theirs.gather(equal)),
        "gather, 4 dtypes": (lambda: gather(whole, one), lambda: ours.gather(mixed), lambda: theirs.gather(mixed)),
        "reduce": (lambda: dist.all_reduce(one), lambda: ours.reduce(equal), lambda: theirs.reduce(equal)),
        "broadcast": (
            lambda: dist.broadcast(one, 0),
            lambda: broadcast(collectives, equal),
            lambda: their_broadcast(equal),
        ),
        "broadcast, 4 dtypes": (
            lambda: dist.broadcast(one, 0),
            lambda: broadcast(collectives, mixed),
            lambda: their_broadcast(mixed),
        ),
        "pad": (
            lambda: gather(whole, one),
            lambda: ours.pad_across_processes(equal),
            lambda: theirs.pad_across_processes(equal),
        ),
    }
    return {
        name: medians(dict(zip(("bare", "ours", "accelerate"), actions, strict=True)), rounds=ROUNDS)
        for name, actions in subjects.items()
    }


def measure() -> list[str]:
    found = notebook_launcher(_on_ranks, num_processes=2, progress="off", timeout=300)[0]
    return [
        f"{name:<20}  {taken['ours'] / taken['accelerate']:5.2f} of accelerate  "
        f"({taken['ours'] * 1e6:.0f} µs; {taken['ours'] / taken['bare']:.1f} bare collectives, "
        f"accelerate {taken['accelerate'] / taken['bare']:.1f})"
        for name, taken in found.items()
    ]
