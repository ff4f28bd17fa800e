"""Interrupts at random moments, in whatever takes its time: nothing hangs, and nothing is left."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from nb_accelerate.notebook.launch import notebook_launcher, servers
from nb_accelerate.notebook.pool import CellOptions, Pool, PoolOptions, read_cell

SEED = 20
COUNT = 60
COLD = 3
"""Of them, those in which the server that ranks are forked from has to import torch first."""

ARRAY = b"x" * 1_000_000


SET_UP = """
import torch
from nb_accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(300, 300))
"""


class Work:
    """What takes its time, by name; ``prepare`` comes before the clock starts."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._checkpoint = str(folder / "state")

    def prepare(self, name: str) -> None:
        if name == "cold launch":
            self._pool.stop()
            servers.close_warm_server()
        elif name in ("launch", "start"):
            self._pool.stop()
        elif not self._pool.has_ranks:
            self._pool.start(PoolOptions(num_processes=2))
        elif self._pool.lost:
            self._pool.restart(min(self._pool.lost))
        if name == "pull":
            self._pool.push({"array": ARRAY})
        if name == "save":
            run(self._pool, SET_UP)
            if Path(self._checkpoint).exists():  # it is whole
                run(self._pool, f"accelerator.load_state({self._checkpoint!r})")

    def do(self, name: str) -> None:
        pool = self._pool
        doings: dict[str, Callable[[], object]] = {
            "launch": lambda: notebook_launcher(int, num_processes=2, progress="off"),
            "cold launch": lambda: notebook_launcher(int, num_processes=2, progress="off"),
            "start": lambda: pool.start(PoolOptions(num_processes=2)),
            "restart": pool.restart,
            "restart 1": lambda: pool.restart(1),
            "stop": pool.stop,
            "push": lambda: pool.push({"array": ARRAY}),
            "pull": lambda: pool.pull(["array"]),
            "cell": lambda: run(pool, "import torch.distributed as dist\ndist.barrier()\nprint(rank)\nrank"),
            "save": lambda: run(pool, f"accelerator.save_state({self._checkpoint!r})"),
        }
        doings[name]()


NAMES = ("launch", "start", "restart", "restart 1", "stop", "push", "pull", "cell", "save")


def run(pool: Pool, code: str) -> list[object]:
    chosen = CellOptions(wants_values=True, progress="off", quiet=True)
    return pool.run(read_cell(code), chosen, variables={})


def interrupted_after(seconds: float, work: Callable[[], None]) -> bool:
    """Do some work while an interrupt comes; gives whether it raised one."""
    came = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        came.set()

    timer = threading.Timer(seconds, interrupt)
    try:
        timer.start()
        work()
        while not came.is_set():  # else it would hit whatever follows
            time.sleep(0.001)
        time.sleep(0.001)
    except KeyboardInterrupt:
        return not came.is_set() or timer.finished.is_set()
    finally:
        timer.join()
    return False


# Python drops an interrupt that comes while a weak reference is removed, and says so.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*WeakSet:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.limit(280)
def test_interrupts_at_random_moments_leave_nothing(tmp_path: Path):
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    pool, seconds, counts = Pool(), dict[str, float](), Counter[str]()
    work = Work(pool, tmp_path)
    try:
        for name in ("cold launch", *NAMES):
            work.prepare(name)
            began = time.monotonic()
            work.do(name)
            seconds[name] = time.monotonic() - began
        names = ["cold launch"] * COLD + [NAMES[index % len(NAMES)] for index in range(COUNT - COLD)]
        chance.shuffle(names)
        for number, name in enumerate(names):
            after = chance.uniform(0.0, 1.2 * seconds[name])
            print(f"{number}: {name}, interrupted after {after:.4f} s of {seconds[name]:.4f} s")
            work.prepare(name)
            counts[name] += interrupted_after(after, lambda name=name: work.do(name))  # type: ignore[misc]
        print("ended early:", dict(counts))
        with contextlib.suppress(ValueError):
            work.prepare("cell")
        assert run(pool, "rank") == [0, 1]
        work.prepare("save")
        work.do("save")  # which removes what saves that were interrupted have left
        assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    finally:
        pool.stop()
