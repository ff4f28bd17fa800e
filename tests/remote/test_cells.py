"""Cells whose ranks are on two machines: what they do, what they keep, and how each end is told."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from fixtures.engines import Machines
from remote.test_launches import wait_for
from typing_extensions import override

from nb_accelerate.errors import DeadlineError, PoolError, RankDiedError
from nb_accelerate.notebook.magics.commands import status_table
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell
from nb_accelerate.notebook.protocol.output import StreamName
from nb_accelerate.notebook.ranks.output.sinks import Sink
from nb_accelerate.notebook.ranks.request_panel import RequestView
from nb_accelerate.notebook.ranks.timeouts import NEVER
from nb_accelerate.notebook.remote.frames import Kind
from nb_accelerate.notebook.remote.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixtures.kernels import Kernel

SUM = "import torch, torch.distributed as dist\nx = torch.ones(1) * 2**rank\ndist.all_reduce(x)\nx.item()"


@pytest.fixture
def pool(machines: Machines) -> Iterator[Pool]:
    """Ranks that stay: rank 0 on machine a, ranks 1 and 2 on b."""
    started = Pool()
    started.start()
    yield started
    started.stop()


def run(
    pool: Pool, text: str, *, timeout: float | None = None, ranks: tuple[int, ...] | None = None, **variables: Any
) -> list[Any]:
    options = CellOptions(wants_values=True, progress="off", timeout=timeout, ranks=ranks)
    return pool.run(read_cell(text), options, variables=variables)


@pytest.mark.contract("machines: cells")
def test_cells_share_variables_collectives_and_output(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    sent = torch.arange(300_000)
    assert run(pool, "total = sent.sum().item()\nprint('here')\ntotal", sent=sent) == [sent.sum().item()] * 3
    assert run(pool, SUM) == [7.0] * 3
    assert run(pool, "import os\nos.environ['OWN'], int(os.environ['LOCAL_RANK']), total - total") == [
        ("a", 0, 0),
        ("b", 0, 0),
        ("b", 1, 0),
    ]
    assert all(rank.memory > 10 << 20 for rank in pool.status())
    assert capfd.readouterr().out.splitlines()[0] == "here"


@pytest.mark.slow
def test_machines_stay_when_the_segments_of_large_values_are_dropped(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    take = Link._take
    monkeypatch.setattr(Link, "_take", lambda link, frame: came.append(frame.kind) or take(link, frame))
    values = run(pool, "import torch\ntorch.ones(300_000) * rank")
    assert [value.sum().item() for value in values] == [0, 300_000, 600_000]
    wait_for(lambda: came.count(Kind.DROP) == 3)
    assert run(pool, SUM) == [7.0] * 3


class Order(Sink):
    """Keeps what it is shown, in order."""

    def __init__(self) -> None:
        self.due = NEVER
        self.shown: list[str] = []

    @override
    def write(self, stream: StreamName, text: str) -> None:
        self.shown += text.split()

    @override
    def display(self, kind: str, content: dict[str, Any]) -> None:
        self.shown.append(content["data"]["text/plain"])


@pytest.mark.slow
def test_displays_stand_where_they_were_made_among_the_output(pool: Pool) -> None:
    order = Order()
    cell = "from IPython.display import display\nif rank == 1:\n    for i in range(40): print(2*i); display(2*i+1)"
    pool.run(read_cell(cell), CellOptions(progress="off", style="raw"), variables={}, sink=order)
    shown = [word for word in order.shown if word.isdigit()]
    assert shown == [str(number) for number in range(80)]


@pytest.mark.slow
def test_a_cell_that_fails_leaves_ranks_that_meet_again(pool: Pool) -> None:
    run(pool, SUM)
    with pytest.raises(ZeroDivisionError):
        run(pool, "if rank == 2:\n    1 / 0\ndist.barrier()")
    assert run(pool, SUM) == [7.0] * 3


@pytest.mark.slow
def test_a_rank_is_taken_out_of_a_collective_that_another_never_joins(pool: Pool) -> None:
    pids = run(pool, f"import os\n{SUM}\nos.getpid()")
    began = time.monotonic()
    with pytest.raises(DeadlineError, match=r"longer than 0\.5 s"):
        run(pool, "import time\nif rank == 1:\n    time.sleep(60)\ndist.barrier()", timeout=0.5)
    assert time.monotonic() - began < 15
    assert run(pool, f"{SUM}\nos.getpid()") == pids


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_died_is_replaced_and_others_keep_their_variables(
    pool: Pool, machines: Machines, rank: int
) -> None:
    run(pool, f"{SUM}\nkept = rank + 10")
    with pytest.raises(RankDiedError, match=f"rank {rank} on {machines.names[rank > 0]} was ended by SIGKILL"):
        run(pool, f"import os\nif rank == {rank}:\n    os.kill(os.getpid(), {signal.SIGKILL})\ndist.barrier()")
    with pytest.raises(PoolError, match=f"%distributed restart {rank}"):
        run(pool, "pass")
    table = [line.split() for line in status_table(pool.status(), {}).splitlines()]
    a, b = machines.names
    assert [line[:2] for line in table] == [["rank", "machine"], ["0", a], ["1", b], ["2", b]]
    assert pool.restart(rank) == [rank]
    assert run(pool, SUM) == [7.0] * 3
    kept = run(pool, "globals().get('kept')")
    assert kept == [None if number == rank else number + 10 for number in range(3)]


@pytest.mark.parametrize("who", ["host of b", "server of b", "host of a"])
@pytest.mark.slow
def test_ranks_of_a_machine_that_is_lost_are_replaced_as_the_error_says(
    pool: Pool, machines: Machines, who: str
) -> None:
    run(pool, "kept = rank")
    hosts = machines.hosts()
    host = hosts[-1] if who.endswith("b") else hosts[0]
    running = pool.begin(read_cell("import time\ntime.sleep(30)"), CellOptions(progress="off"))
    machines.kill(next(one for one in host.children() if one.name() == "nb-server") if "server" in who else host)
    with pytest.raises(PoolError) as caught:
        pool.finish(running)
    said = str(caught.value)
    lost, lives = ([1, 2], 0) if who.endswith("b") else ([0], 1)
    others = r"So is rank [12]\. Their" if lost[0] else "Its"
    assert re.search(rf"rank {lost} .*is lost: [^\0]*\. {others} variables are lost", said), said
    assert run(pool, "kept", ranks=(lives,)) == pool.pull(["kept"], [lives])[0] == [lives]
    assert pool.differing(["kept"]) == (["kept"] if lives else [])
    pool.push({"new": 5}, [lives])
    advised = re.search(r"%distributed restart (\d)", said)
    assert advised is not None
    assert pool.restart(int(advised[1])) == lost
    assert run(pool, SUM) == [7.0] * 3
    assert run(pool, "globals().get('kept')") == [None if rank in lost else rank for rank in range(3)]


KEPT = "%%distributed\nkept = rank + 10"
FOUND = f"%%distributed --out found\n{SUM}, globals().get('kept')"


def advised(text: str) -> list[str]:
    """Return the lines that a text tells users to write."""
    return re.findall(r"%+distributed (?:restart \d+|.*)", text)


def lose(machines: Machines, kernel: Kernel, kind: str) -> None:
    """Have ranks 1 and 2 on machine b end, or rank 2 alone."""
    host = machines.hosts()[1]
    if kind == "rank":
        kernel.run("%%distributed --ranks 2 --background\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    elif kind == "server":
        machines.kill(machines.servers()[1])
    elif kind == "silent":
        kernel.run("from nb_accelerate.notebook.remote import sender\nsender.SILENCE_LIMIT = 2").ok()
        machines.kill(host, signal.SIGSTOP)
    elif kind == "sshd":
        machines.kill(next(one for one in host.parents() if one.name().startswith("sshd")))
    else:
        children = psutil.Process(kernel.pid).children()
        carriers = [child for child in children if child.name() == "ssh" and "b" in child.cmdline()]
        machines.kill(carriers[0] if kind == "command" and carriers else host)
    lost = 1 if kind == "rank" else 2
    wait_for(lambda: sum("ended" in row for row in kernel.run("%distributed status").ok().stdout.splitlines()) == lost)


@pytest.mark.slow
def test_an_interrupt_takes_back_what_is_on_its_way_to_a_machine(
    pool: Pool, machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    host = machines.hosts()[1]
    large = torch.zeros(10_000_000)
    machines.kill(host, signal.SIGSTOP)  # as a network through which little goes
    options = CellOptions(progress="off", ranks=(1, 2), send=("large",))
    request = pool.begin(read_cell("kept = len(large)"), options, variables={"large": large})
    wait_for(lambda: request.ranks[0].handle.unsent()[0] > 30e6)
    sent, _ = RequestView(request, ()).statuses()
    assert 30e6 < sent.sending[0] < 42e6
    assert sent.sending[1] == pytest.approx(40e6, rel=0.01)
    pool.interrupt()
    said = ""
    while "has not come to" not in said:
        assert not request.done.wait(0.02)
        said += capsys.readouterr().err
    assert "C code" not in said
    assert f"not come to {machines.names[1]} yet" in said
    assert request.ranks[0].handle.unsent()[0] < 4e6
    machines.kill(host, signal.SIGCONT)
    with pytest.raises(KeyboardInterrupt):
        pool.finish(request)
    assert run(pool, "{'large', 'kept'} & {*globals()}", ranks=(1, 2)) == [set()] * 2
    assert run(pool, "len(large)", ranks=(1, 2), large=large) == [10_000_000] * 2
    assert run(pool, SUM) == [7.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "kind"),
    [
        *itertools.product(["command", "ssh"], ["rank", "host", "silent", "server"]),
        *[("ssh", "command"), ("ssh", "sshd")],
    ],
    indirect=["machines"],
)
def test_each_line_that_a_loss_is_told_with_does_what_it_says(machines: Machines, kernel: Kernel, kind: str) -> None:
    if kind == "sshd":  # the host is to be its child
        kernel.run(f"import os; os.environ['NB_ACCELERATE_REMOTE_PYTHON'] = {sys.executable!r}").ok()
    kernel.run("%load_ext nb_accelerate")
    kernel.run(KEPT).ok()
    host = machines.hosts()[1]
    lose(machines, kernel, kind)
    told = kernel.run("%%distributed\nrank")
    assert told.error == "PoolError"
    if kind not in ("rank", "server"):
        assert re.search(r"1 and 2\b.* lost: ", told.message)
        assert told.message.count("is lost") == 1
    ranks = "0" if kind != "rank" else "0,1"
    assert f"--ranks {ranks}" in told.message
    assert kernel.run(f"%%distributed --ranks {ranks} --out found\nkept").ok()
    assert kernel.run("found[0]").ok().value == "10"
    assert kernel.run("%distributed pull kept\nkept").ok().value == "10"
    kernel.run("x = 3\n%distributed push x --ranks 0").ok()
    [line] = advised(told.message)
    assert "new" in kernel.run(line).ok().stdout
    kernel.run(FOUND).ok()
    new = "None" if kind != "rank" else "11"
    assert kernel.run("found").ok().value == f"[(7.0, 10), (7.0, {new}), (7.0, None)]"
    if kind == "silent" and host.is_running():
        machines.kill(host)


@pytest.mark.slow
def test_a_machine_that_does_not_come_back_leaves_the_others_and_is_told(
    machines: Machines, kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run("%load_ext nb_accelerate")
    kernel.run(KEPT).ok()
    lose(machines, kernel, "command")
    folder = next(path for path in (tmp_path / "b", tmp_path / "sshd" / "b") if path.exists())
    folder.rename(tmp_path / "away")  # where its commands begin
    for line in ("%distributed restart", "%distributed restart 1"):
        told = kernel.run(line)
        assert told.error == "StartError"
        assert "machine b cannot" in told.message
    again, cell, pull, stop, start = advised(told.message)
    assert kernel.run(f"{cell} --out found\nkept").ok()
    assert kernel.run("found").ok().value == "[10]"
    assert kernel.run(f"{pull.replace('NAME', 'kept')}\nkept").ok().value == "10"
    (tmp_path / "away").rename(folder)
    assert re.fullmatch(r"ranks 1, 2\b.* kept\n", kernel.run(again).ok().stdout)
    kernel.run(FOUND).ok()
    lose(machines, kernel, "command")
    kernel.run(stop).ok()
    kernel.run(start).ok()
    kernel.run("%%distributed --out found\nrank").ok()
    assert kernel.run("found").ok().value == "[0]"


@pytest.mark.slow
def test_machines_that_import_for_long_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on = tmp_path / "go-on"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'torch' in sys.orig_argv:\n    while not os.path.exists({str(go_on)!r}): pass\n"
    )
    monkeypatch.setattr(Pool, "timeouts", replace(Pool.timeouts, start=0.3))
    options = PoolOptions(
        engine="command",
        hosts=["a"],
        command_template=f"env PYTHONPATH={tmp_path} {{command}}",
        remote_python=sys.executable,
    )
    pool = Pool()
    with ThreadPoolExecutor() as threads:
        started = threads.submit(pool.start, options)
        said = ""
        while "rank 0 still starts after 0.3 s (importing torch)" not in said and not started.done():
            time.sleep(0.02)
            said += capsys.readouterr().err
        go_on.touch()
        started.result()
    assert run(pool, "rank") == [0]
    pool.stop()


@pytest.mark.slow
def test_an_interrupt_ends_a_cell_and_no_rank(pool: Pool) -> None:
    pids = run(pool, "import os\nos.getpid()")
    handle = pool.begin(read_cell("import time\ntime.sleep(60)"), CellOptions(progress="off"))
    while not all(rank.handle.page.read().request > 1 for rank in handle.ranks):
        time.sleep(0.01)  # there is no event for "all ranks have begun"
    began = time.monotonic()
    pool.interrupt()
    with pytest.raises(KeyboardInterrupt):
        pool.finish(handle)
    assert time.monotonic() - began < 15
    assert run(pool, "os.getpid()") == pids


WAIT_UNTIL_SILENT = """
import gc, time
from nb_accelerate.notebook.remote import link
while not any(one.is_slow() for one in gc.get_objects() if isinstance(one, link.Link)):
    time.sleep(0.05)
link._CLOSE_TIMEOUT = 600
"""


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["command", "ssh"], indirect=True)
def test_an_interrupt_ends_the_wait_for_a_machine_that_is_silent(machines: Machines, kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate")
    kernel.run("%%distributed --out pids\nimport os\nos.getpid()").ok()
    rank_0, rank_1, _ = json.loads(kernel.run("pids").ok().value or "")
    host = machines.hosts()[1]
    machines.kill(host, signal.SIGSTOP)
    kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", quit=600.0)
    kernel.run(WAIT_UNTIL_SILENT).ok()
    cell = kernel.start("%distributed stop")
    wait_for(lambda: not psutil.pid_exists(rank_0))  # it was told to end, and so were the others
    kernel.manager.interrupt_kernel()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert "no ranks" in kernel.run("%distributed status").ok().stdout
    if host.is_running():  # on another machine
        machines.kill(host, signal.SIGCONT)
    wait_for(lambda: not psutil.pid_exists(rank_1))  # the host ends what it has started


@pytest.mark.slow
def test_nothing_stays_when_it_is_stopped(machines: Machines) -> None:
    before = psutil.Process().children(recursive=True)
    pool = Pool()
    pool.start()
    started = [process for process in psutil.Process().children(recursive=True) if process not in before]
    started = [process for process in started if process.name().startswith("nb-")]
    assert len(started) >= 7
    pool.stop()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
