"""What the panel costs: a write on the page, a training loop that is watched, and the kernel that watches."""

from __future__ import annotations

import json
import math
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from turns import pin, ratio_of_sums

from nb_accelerate import notebook_launcher
from nb_accelerate.base.progress_page import PageReader, Phase, ProgressPage, layout
from nb_accelerate.notebook.display.drawing.notebook_panel import NotebookPanel
from nb_accelerate.notebook.display.panel import Action, Panel
from nb_accelerate.notebook.display.rank_history import RankObservation
from nb_accelerate.notebook.display.view import Facts
from nb_accelerate.notebook.protocol.anonymous_file import anonymous_file

RANKS = 64
STEPS = 20
"""Of an epoch: short, so that the machine is the same for both."""

PAIRS = 8
ROUNDS = 50
SECONDS = 10.0


# Writing.


def _nanoseconds(action: Any, number: int = 100_000) -> float:
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(number):
            action()
        best = min(best, (time.perf_counter() - began) / number)
    return 1e9 * best


def _a_step(page: ProgressPage) -> Any:
    """What the loader, `backward` and the optimizer write in one step."""
    enter, step, trains = page.enter, page.step, page.trains

    def write() -> None:
        enter(Phase.DATA)
        step(7)
        enter(Phase.FORWARD)
        enter(Phase.BACKWARD)
        trains()
        enter(Phase.RUNNING)
        enter(Phase.STEP)
        trains()
        enter(Phase.RUNNING)

    return write


def _writing() -> list[str]:
    page = ProgressPage(mmap.mmap(-1, layout.SIZE))
    page.begin_request()
    empty = _nanoseconds(lambda: None)
    one = _nanoseconds(lambda: page.step(7)) - empty
    whole = _nanoseconds(_a_step(page)) - empty
    logged = _nanoseconds(lambda: page.log({"loss": 0.5}), 10_000) - empty
    return [
        f"a write on the page           {one:6.0f} ns",
        f"all nine writes of a step      {whole:6.0f} ns  (target: under 1000)",
        f"a logged value                 {logged:6.0f} ns",
    ]


# Training.


def _watched(width: int, batch_size: int) -> dict[str, list[float]]:
    """By round, CPU seconds for a step: of epochs that are reported, and of others that are not.

    They take turns in one process, and a panel watches all the time. CPU time, as that of others is not in it. What is
    reported is written by the thread that trains, so that thread's time tells the difference: gloo's threads take more
    or less by chance. "whole" is the time of all threads, without reports. In a round there are several epochs, as the
    loss is looked at ten times a second only.
    """
    from nb_accelerate import Accelerator
    from nb_accelerate.base.progress_page import page as pages

    torch.set_num_threads(1)
    pin()
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    rows = 2 * STEPS * batch_size
    data = TensorDataset(torch.ones(rows, width), torch.zeros(rows, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(data, batch_size=batch_size)
    )

    def epoch() -> tuple[float, float]:
        accelerator.wait_for_everyone()
        began, whole = time.thread_time(), time.process_time()
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
        return time.thread_time() - began, time.process_time() - whole

    core = accelerator.core
    reported = core.page, core.losses.report
    silent = _Silent(), _nothing

    def use(page: ProgressPage, report: Any) -> None:
        pages._page = page
        object.__setattr__(core, "page", page)
        core.losses.report = report  # type: ignore[method-assign]

    taken: dict[str, list[float]] = {"reported": [], "silent": [], "whole": []}
    for _ in range(ROUNDS + 1):
        for seconds in taken.values():
            seconds.append(0.0)
        for number in range(PAIRS):
            for name in ("reported", "silent") if number % 2 else ("silent", "reported"):
                use(*(reported if name == "reported" else silent))
                own, whole = (seconds / (PAIRS * STEPS) for seconds in epoch())
                taken[name][-1] += own
                if name == "silent":
                    taken["whole"][-1] += whole
    use(*reported)
    return {name: seconds[1:] for name, seconds in taken.items()}


def _nothing(*_: Any) -> None:
    pass


class _Silent(ProgressPage):
    """A page that takes everything and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = self.step = self.trains = _nothing

    def begin_loop(self, **_: Any) -> Any:
        return None

    def end_loop(self, loop: Any) -> None:
        pass

    def wait_in(self, collective: Any) -> int:
        return 0


def _training() -> list[str]:
    ranks = notebook_launcher(_watched, (256, 64), num_processes=2, progress="text", timeout=300, devices="cpu")
    reported, silent, whole = (
        [sum(both) / 2 for both in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in ("reported", "silent", "whole")
    )
    watched = [w + r - s for r, s, w in zip(reported, silent, whole, strict=True)]
    low, ratio, high = ratio_of_sums(watched, whole)
    return [
        f"a step that is reported        {ratio:6.4f} of one that is not  (19 of 20 times in {low:.4f} to {high:.4f}; "
        f"{1e6 * statistics.mean(whole):.0f} µs; target: under 1.01)"
    ]


# Watching.

WRITER = """
import sys, time
from nb_accelerate.base.progress_page import ProgressPage, Phase
from nb_accelerate.base.progress_page import layout
import mmap
pages = [ProgressPage(mmap.mmap(int(fd), layout.SIZE)) for fd in sys.argv[1:]]
for page in pages:
    page.begin_request()
    page.begin_loop(total=100_000, rows=2048, epoch=1, evaluates=False)
    page.trains()
step = 0
while True:
    step += 1
    for rank, page in enumerate(pages):
        page.step(step)
        page.enter((Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.STEP)[(step + rank) % 4])
        page.loss(2.0 + 1.0 / step)
        page.log({"loss": 2.0 + 1.0 / step, "lr": 0.1})
    if step == 1:
        print("ready", flush=True)
    time.sleep(0.05)
"""


class _Ranks:
    """64 ranks that are readers another process writes on; their processes are this one's writer, 64 times."""

    def __init__(self, readers: list[PageReader], pid: int) -> None:
        self._pages, self._pid = readers, pid

    def statuses(self) -> list[RankObservation]:
        return [
            RankObservation(rank=rank, sample=reader.read(), pid=self._pid) for rank, reader in enumerate(self._pages)
        ]

    def ask(self) -> None:
        raise AssertionError("nobody is stalled")

    def note_lines(self) -> None:
        pass

    def stacks(self) -> dict[int, str]:
        return {}

    def runs(self) -> tuple[str, ...]:
        return ()

    def log(self, rank: int) -> str:
        return str(rank)

    def actions(self) -> tuple[Action, ...]:
        return (Action("Interrupt", "", lambda: None),)


class _Wire:
    """Counts what goes to the front end."""

    def __init__(self) -> None:
        self.messages = self.largest = 0

    def take(self, content: Any) -> None:
        self.messages += 1
        self.largest = max(self.largest, len(json.dumps(content, default=str, ensure_ascii=False).encode()))

    # As the cell a panel is drawn in:

    def write(self, stream: Any, text: str) -> None:
        self.take(text)

    def display(self, kind: str, content: dict[str, Any]) -> None:
        self.take(content)


@contextmanager
def _widgets_on(wire: _Wire) -> Iterator[None]:
    """Let real ipywidgets send their messages to `wire`."""
    import comm
    from comm.base_comm import BaseComm

    class Counted(BaseComm):
        def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any):  # type: ignore[override]
            wire.take({"type": msg_type, "data": data, "metadata": metadata})

    before, comm.create_comm = comm.create_comm, Counted
    try:
        yield
    finally:
        comm.create_comm = before


def _kernel() -> Any:
    """What stands for a kernel whose panels have buttons; nobody presses one."""
    loop = SimpleNamespace(add_callback=lambda *_: None, call_later=lambda *_: None)
    stream = SimpleNamespace(io_loop=loop, on_recv=lambda *_, **__: None, flush=lambda: None)
    return SimpleNamespace(
        shell_stream=stream, schedule_dispatch=print, dispatch_shell=print, _parents={}, comm_manager=stream
    )


def _watching() -> list[str]:
    wire = _Wire()
    with ExitStack() as stack:
        readers = [PageReader(anonymous_file()) for _ in range(RANKS)]
        for reader in readers:
            stack.callback(reader.close)
        fds = [reader.fd for reader in readers]
        writer = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", WRITER, *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(writer.kill)
        assert writer.stdout is not None
        writer.stdout.readline()
        stack.enter_context(_widgets_on(wire))
        watched = _Ranks(readers, writer.pid)
        drawing = NotebookPanel(wire, _kernel(), range(RANKS), watched)
        panel = Panel(Facts(name="train", setup=(f"{RANKS} ranks", "CPU")), range(RANKS), drawing, watched)
        _refresh_for(panel, 3.0)  # until it is drawn, and the widgets are made
        wire.messages = wire.largest = 0
        began, used = time.monotonic(), time.process_time()
        looks = _refresh_for(panel, SECONDS)
        used, seconds = time.process_time() - used, time.monotonic() - began
        pace, kilobytes = wire.messages / seconds, wire.largest / 1000
        panel.finish("done")
    share = 100 * used / seconds
    return [
        f"watching {RANKS} ranks              {share:6.2f} % of a core  (target: under 1; {looks} looks)",
        f"sent to the front end          {pace:6.1f} messages a second of at most {kilobytes:.1f} kB  (targets: 2, 6)",
    ]


def _refresh_for(panel: Panel, seconds: float) -> int:
    end, looks = time.monotonic() + seconds, 0
    while (now := time.monotonic()) < end:
        if now >= panel.due:
            panel.refresh()
            looks += 1
        time.sleep(max(0.0, panel.due - time.monotonic()))
    return looks


def measure() -> Iterator[str]:
    yield from _writing()
    yield from _watching()
    yield from _training()
