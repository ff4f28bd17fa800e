"""Where ranks of one machine meet: nobody else can, they meet again and again, and they say who does not come."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixtures.ranks import RunRanks

from nb_accelerate import notebook_launcher
from nb_accelerate.notebook.worker.connections import connections


@pytest.fixture(params=["a file", "a socket"])
def any_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in a file without a name, or, as on macOS, in a store that one of them serves."""
    if request.param == "a socket":
        monkeypatch.setattr("nb_accelerate.notebook.launch.rendezvous._file_without_name", lambda: -1)


def test_groups_are_made_again_and_again_whoever_makes_them(run_ranks: RunRanks) -> None:
    def again() -> tuple[int, list[int]]:
        import torch
        import torch.distributed as dist

        from nb_accelerate import Accelerator

        met = 0
        for number in range(60):
            if number % 3:
                accelerator = Accelerator(cpu=True)
                met += int(accelerator.reduce(torch.ones(1), "sum").item())
                accelerator.end_training()
            else:
                dist.init_process_group("gloo")
                ones = torch.ones(1)
                dist.all_reduce(ones)
                met += int(ones.item())
                dist.destroy_process_group()
        dist.init_process_group("gloo")
        seen: list[int] = []
        for _ in range(5):
            dist.monitored_barrier()
            everybody: list[Any] = [None, None]
            dist.all_gather_object(everybody, dist.get_rank(), group=dist.new_group([0, 1]))
            seen += everybody
        return met, seen

    assert run_ranks(again) == [(120, [0, 1] * 5)] * 2


def test_the_store_of_a_group_does_what_torchs_do(run_ranks: RunRanks) -> None:
    def use() -> list[Any]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        mine = f"key {dist.get_rank()}"
        store.set(mine, "one")
        store.wait([mine])
        found = [store.get(mine), store.compare_set(mine, "one", "two"), store.get(mine), store.check([mine, "other"])]
        found += [store.add(f"{mine} count", 3), store.clone().get(mine), store.num_keys() > 0]
        return [*found, store.delete_key(mine), store.check([mine])]

    assert run_ranks(use) == [[b"one", b"two", b"two", False, 3, b"two", True, True, False]] * 2


@pytest.mark.usefixtures("any_store")
def test_an_address_and_a_store_of_the_ranks_own_work_beside_it(run_ranks: RunRanks) -> None:
    def meet(port: int) -> tuple[list[float], list[int]]:
        import torch
        import torch.distributed as dist

        from nb_accelerate.base.progress_page import here, layout

        rank = int(os.environ["RANK"])
        found, others = [], []
        ours = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        for url in (ours, f"tcp://127.0.0.1:{port}", ours):
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
            ones = torch.ones(1)
            dist.all_reduce(ones)
            found.append(ones.item())
            others.append(here().words[layout.OTHER_GROUP])
            dist.destroy_process_group()
        store: Any = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)  # type: ignore[attr-defined]
        store.set(f"{rank}", "there")
        store.wait(["0", "1"])
        dist.init_process_group("gloo")
        dist.barrier()  # or rank 0, which serves that store, could leave before
        return found, others

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # At another address there may be processes of another launch, so that a wait for them is no deadlock.
    assert run_ranks(meet, port) == [([2.0, 2.0, 2.0], [0, 1, 1])] * 2


@pytest.mark.slow
def test_ranks_and_a_process_that_is_none_of_them_make_a_group(run_ranks: RunRanks) -> None:
    def meet(port: int) -> float:
        import subprocess
        import sys
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        rank, url = int(os.environ["RANK"]), f"tcp://127.0.0.1:{port}"
        timeout = timedelta(seconds=20)
        join = (
            "import torch; from datetime import timedelta; import torch.distributed as dist\n"
            f"dist.init_process_group('gloo', init_method='{url}', rank=2, world_size=3,"
            " timeout=timedelta(seconds=20))\n"
            "dist.all_reduce(torch.ones(1)); dist.destroy_process_group()"
        )
        other = subprocess.Popen([sys.executable, "-c", join]) if rank == 0 else None
        ones = torch.ones(1)
        try:
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=3, timeout=timeout)
            dist.all_reduce(ones)
        finally:
            if other is not None:
                other.wait()
        return ones.item()

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert run_ranks(meet, port) == [3.0, 3.0]


def test_who_does_not_come_is_named_when_the_time_is_over(run_ranks: RunRanks, tmp_path: Path) -> None:
    end = tmp_path / "end"
    os.mkfifo(end)

    def meet(end: str) -> str:
        from datetime import timedelta

        import torch.distributed as dist

        rank = int(os.environ["RANK"])
        if rank:
            with open(end, "rb"):  # until rank 0 has had enough
                return ""
        texts = []
        for _ in range(2):
            try:
                dist.init_process_group("gloo", timeout=timedelta(seconds=0.2))
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
        os.close(os.open(end, os.O_WRONLY))
        assert texts[0] == texts[1]
        return texts[0]

    said = run_ranks(meet, str(end))[0]
    assert said.startswith("DistStoreError: rank 1 ")
    assert "Accelerator() or init_process_group()" in said


@pytest.mark.usefixtures("any_store")
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_reaches_a_rank_that_waits_for_others(run_ranks: RunRanks, tmp_path: Path, late: bool) -> None:
    end = tmp_path / "end"
    os.mkfifo(end)

    def wait(end: str) -> str:
        import torch.distributed as dist

        if late:
            dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            with open(end, "rb"):
                return ""

        def raise_it(*_: object) -> None:
            raise KeyboardInterrupt("while it waited")

        # As the real one, which ends the launch.
        signal.signal(signal.SIGUSR1, raise_it)
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
        timer.start()
        try:
            dist.new_group() if late else dist.init_process_group("gloo")
        except KeyboardInterrupt as error:
            return str(error)
        finally:
            os.close(os.open(end, os.O_WRONLY))
        return "nothing"

    assert run_ranks(wait, str(end))[0] == "while it waited"


GARBAGE = """
import encodings.idna, os, socket, struct, sys
os.setuid(int(sys.argv[1]))  # somebody else
kept = []
deepest = 32
while line := sys.stdin.readline():
    for port in map(int, line.split()):
        # What gloo takes for a rank is a small number, in eight bytes.
        numbers = [struct.pack("<q", number) for number in range(8)]
        garbage = [b"", b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(4096), struct.pack("<I", 0x3C85F7CE) + bytes(64)]
        for text in numbers + garbage:
            try:
                one = socket.create_connection(("127.0.0.1", port), timeout=5)
                one.sendall(text)
                kept.append(one)
            except OSError:
                pass
    print(len(kept), flush=True)
"""


def listening() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            sockets = connections(process)
        except psutil.Error:
            continue
        found |= {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="is another user for a while")
def test_garbage_of_another_user_on_every_port_of_the_ranks_changes_nothing_while_they_meet(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def meet(go: str) -> float:
        import torch
        import torch.distributed as dist

        module = dist.distributed_c10d
        make = module.ProcessGroupGloo

        def make_late(*args: object, **options: object) -> object:  # in the middle of the meeting: the other one waits
            module.ProcessGroupGloo = make
            while not os.path.exists(go):
                time.sleep(0.005)
            return make(*args, **options)

        if os.environ["RANK"] == "0":
            module.ProcessGroupGloo = make_late
        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    command = [sys.executable, "-c", GARBAGE, "12345"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        launch: Any = notebook_launcher(meet, (str(go),), 2, progress="off", block=False, timeout=45)
        while not listening():
            assert not launch.wait(0.01)
        print(*listening(), file=other.stdin, flush=True)
        assert int(other.stdout.readline()) > 0  # gloo, which rank 1 has started already, does listen
        go.touch()
        assert launch.result() == [2.0, 2.0]
        other.stdin.close()
        assert other.wait(20) == 0


@pytest.mark.slow
@pytest.mark.may_leave("files")  # torch elastic's
def test_a_group_is_made_again_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom nb_accelerate import Accelerator\n"
        "for _ in range(15):\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    assert accelerator.reduce(torch.ones(1)).item() == 2\n"
        "    accelerator.end_training()\n"
        "print('done')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert ran.stdout.count("done") == 2
