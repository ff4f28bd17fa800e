"""Saving and loading a model of 500 MB with AdamW, beside accelerate, and beside what the disk does."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nb_accelerate import notebook_launcher

WIDTH, LAYERS = 2048, 30  # 126 million weights of 4 bytes; AdamW has two numbers for each
ROUNDS = 5


def _times(where: str, width: int, layers: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds, and seconds of the processors, that each action took on this rank, in turns; and bytes of memory."""
    from accelerate import Accelerator as Theirs

    from nb_accelerate import Accelerator

    ours, theirs = _trained(Accelerator(cpu=True), width, layers), _trained(Theirs(cpu=True), width, layers)
    tensors = [*ours.core.prepared.models[0].parameters()]
    tensors += [one for of in ours.core.prepared.optimizers[0].state.values() for one in of.values() if one.dim()]
    copies = [torch.empty_like(one) for one in tensors]
    taken: dict[str, list[tuple[float, float]]] = {}

    def time_of(name: str, action: Callable[[], Any]) -> Any:
        ours.wait_for_everyone()
        if ours.is_main_process:
            os.sync()  # what was written before is not to be paid for here
        ours.wait_for_everyone()
        began, used = time.perf_counter(), time.process_time()
        result = action()
        ours.wait_for_everyone()
        taken.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - used))
        return result

    def durable(save: Callable[[], Any]) -> None:
        save()
        if ours.is_main_process:
            os.sync()

    def copy() -> None:
        with torch.no_grad():
            for source, target in zip(tensors, copies, strict=True):
                target.copy_(source)

    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        time_of("save ours", lambda: ours.save_state(f"{where}/ours"))  # always durable
        taken.setdefault("more memory", []).append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 0))
        time_of("save theirs", lambda: theirs.save_state(f"{where}/theirs"))
        time_of("durable theirs", lambda: durable(lambda: theirs.save_state(f"{where}/theirs")))
        for _ in range(3):
            time_of("load ours", lambda: ours.load_state(f"{where}/ours"))
            time_of("load theirs", lambda: theirs.load_state(f"{where}/theirs"))
        handle = time_of("blocked", lambda: ours.save_state(f"{where}/ours", async_save=True))
        handle.wait()
        time_of("copy", copy)
    return taken


def _trained(accelerator: Any, width: int, layers: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator


def _first_load(which: str, folder: str, width: int, layers: int, save: bool) -> tuple[float, float]:
    """Seconds, and seconds of the processors, of the first load in this process: a run that goes on loads once."""
    from accelerate import Accelerator as Theirs

    from nb_accelerate import Accelerator

    package: Any = Accelerator if which == "ours" else Theirs
    if save:
        _trained(package(cpu=True), width, layers).save_state(folder)
        return 0.0, 0.0
    accelerator = package(cpu=True)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.wait_for_everyone()
    began, used = time.perf_counter(), time.process_time()
    accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    return time.perf_counter() - began, time.process_time() - used


def _first_loads(where: str, ranks: int) -> dict[str, tuple[float, float]]:
    """Medians of `_first_load` of both packages, in turns, each in new processes."""
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    for number in range(ROUNDS + 1):
        for which, pairs in taken.items():
            pair = notebook_launcher(
                _first_load,
                (which, f"{where}/{which}", WIDTH, LAYERS, number == 0),
                ranks,
                progress="off",
                start_method="forkserver",
                timeout=300,
            )[0]
            if number:
                pairs.append(pair)
        if not number:
            os.sync()
    return {
        which: (statistics.median(wall for wall, _ in pairs), statistics.median(used for _, used in pairs))
        for which, pairs in taken.items()
    }


def _rate_of_disk(where: Path, num_bytes: int) -> float:
    """Seconds that it takes to write as many bytes, until they are durable."""
    piece = os.urandom(1 << 24)
    began = time.perf_counter()
    with (where / "raw").open("wb") as file:
        for _ in range(num_bytes >> 24):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def measure() -> list[str]:
    lines = []
    size = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    parent = Path("build").resolve()
    parent.mkdir(exist_ok=True)
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory(dir=parent) as where:
            disk = _rate_of_disk(Path(where), size)
            shutil.rmtree(where)
            Path(where).mkdir()
            first = _first_loads(where, ranks)
            taken = notebook_launcher(
                _times, (where, WIDTH, LAYERS, ROUNDS), ranks, progress="off", start_method="forkserver", timeout=900
            )[0]
        last, cpu = (
            {name: statistics.median(pair[which] for pair in pairs[1:]) for name, pairs in taken.items()}
            for which in (0, 1)  # the first one fills fresh memory
        )

        def ratio(above: str, below: str, *, cpu: dict[str, float] = cpu, last: dict[str, float] = last) -> str:
            return f"{last[above] / last[below]:5.2f} (processors {cpu[above] / cpu[below]:.2f})"

        lines += [
            f"{ranks} rank{'s' if ranks > 1 else ' '}  save   {ratio('save ours', 'save theirs')} of accelerate, "
            f"{last['save ours'] / last['durable theirs']:.2f} until durable  ({last['save ours']:.2f} s; the disk "
            f"alone {disk:.2f} s for {size / 1e9:.1f} GB; {taken['more memory'][0][0] / 1024:.0f} MB more memory at "
            f"first, then {last['more memory'] / 1024:.0f} MB)",
            f"         load   {first['ours'][0] / first['theirs'][0]:5.2f} (processors "
            f"{first['ours'][1] / first['theirs'][1]:.2f}) of accelerate in a new process ({first['ours'][0]:.2f} s), "
            f"{ratio('load ours', 'load theirs')} once more ({last['load ours']:.2f} s)",
            f"         async  {last['blocked'] / last['save ours']:5.2f} of a save is waited for, "
            f"{ratio('blocked', 'copy')} of a copy into used memory ({last['blocked']:.2f} s)",
        ]
    return lines
