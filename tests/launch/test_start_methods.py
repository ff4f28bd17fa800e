"""One contract, every start method: what is started runs, hears, answers, and is closed."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nb_accelerate.base.progress_page import here
from nb_accelerate.errors import ConfigError, StartError
from nb_accelerate.notebook.launch import Launch, notebook_launcher, servers
from nb_accelerate.notebook.launch.local import LocalRank
from nb_accelerate.notebook.ranks.end_reports import end_reports
from nb_accelerate.notebook.ranks.request_panel import make_panel

METHODS = ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow), "inline"]


def launch(function: Any, *args: Any, method: str, **options: Any) -> list[Any]:
    ranks = 1 if method == "inline" else 2
    return notebook_launcher(function, args, ranks, start_method=method, progress="off", timeout=45, **options)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.contract("a launch: fork, forkserver, spawn")
def test_arguments_arrive_and_values_come_back(method: str) -> None:
    def function(first: int, *, second: int) -> tuple[int, int, int]:
        return first, second, int(os.environ["RANK"])

    values = launch(function, 1, method=method, kwargs={"second": 2})
    assert values == [(1, 2, rank) for rank in range(len(values))]


def test_a_name_with_what_terminals_take_for_a_command_is_shown_without() -> None:
    def function() -> None:
        pass

    function.__qualname__ = "a\x1b[2J\nb"
    launched: Any = notebook_launcher(function, (), 1, progress="off", block=False)
    launched.result(45)
    assert " a [2J b on" in repr(launched)


def test_an_exception_arrives_with_its_own_type_and_fields(method: str) -> None:
    def function() -> None:
        raise FileNotFoundError(2, "no such file", "name")

    with pytest.raises(FileNotFoundError) as caught:
        launch(function, method=method)
    assert caught.value.filename == "name"


@pytest.mark.parametrize("method", METHODS[:-1])
def test_asking_for_input_says_where_to_ask_instead(method: str) -> None:
    with pytest.raises(EOFError, match=r"^input\(\) does not work"):
        launch(lambda: input("name? "), method=method)


def test_the_environment_is_torchruns_and_only_the_ranks(method: str) -> None:
    def function() -> tuple[str, ...]:
        names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MINE", "ACCELERATE_MIXED_PRECISION")
        return tuple(os.environ[name] for name in names)

    before = dict(os.environ)
    values = launch(function, method=method, env={"MINE": "yes"}, mixed_precision="bf16")
    size = str(len(values))
    assert values == [(size, str(rank), "127.0.0.1", "yes", "bf16") for rank in range(len(values))]
    assert dict(os.environ) == before


@pytest.mark.may_leave("descriptors")  # of the store that torch opens in this process for an inline rank, and keeps
def test_a_process_group_can_be_opened_and_is_gone_afterwards(method: str) -> None:
    def function() -> float:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    for _ in range(2):
        values = launch(function, method=method)
        assert values == [float(len(values))] * len(values)
    import torch.distributed as dist

    assert not dist.is_initialized()


def test_what_is_printed_is_heard(
    method: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)

    # Equal output is one line, however late a rank of a busy machine is.
    monkeypatch.setattr(Launch, "timeouts", replace(Launch.timeouts, fold=30.0))
    launch(function, method=method)
    heard = capfd.readouterr()
    assert (heard.out, heard.err) == ("to stdout\n", "to stderr\n")


def test_a_large_matmul_here_does_not_hang_the_ranks(method: str) -> None:
    import torch

    def function() -> tuple[int, ...]:
        x = torch.ones(800, 800)
        return tuple((x @ x).shape)

    function()
    assert launch(function, method=method)[0] == (800, 800)


def test_ranks_see_the_working_directory_and_path_of_now(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for value in launch(lambda: (os.getcwd(), sys.path[0]), method=method):
        assert value == (str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("method", METHODS[:-1])
def test_an_interrupt_before_anybody_watches_over_the_ranks_ends_them(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> None:
        Path(tmp_path, str(os.getpid())).touch()
        time.sleep(600)

    def is_interrupted(*_: object, **__: object) -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)  # there is no event for what another process writes
        raise KeyboardInterrupt

    monkeypatch.setattr("nb_accelerate.notebook.ranks.loop.RankLoop.run", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch(function, method=method)
    for path in tmp_path.iterdir():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(path.name)).wait(30)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Sends SIGINT to another thread of this process, as may happen in a kernel when the main thread has blocked it."""
    asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()

    def serve() -> None:
        while (done := asked.get()) is not None:
            signal.raise_signal(signal.SIGINT)
            done.set()

    def send() -> None:
        done = threading.Event()
        asked.put(done)
        done.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    yield send
    asked.put(None)
    thread.join()


@pytest.mark.parametrize("where", ["os.fork", "threading.Thread.start"])
def test_an_interrupt_while_this_process_is_forked_comes_afterwards(
    where: str, interrupt: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = os.getpid()
    owner, _, name = where.rpartition(".")
    call = getattr({"os": os, "threading.Thread": threading.Thread}[owner], name)

    def with_an_interrupt(*args: Any) -> Any:
        result = call(*args)
        if os.getpid() == kernel:
            interrupt()
        return result

    def function() -> None:
        Path(tmp_path, os.environ["RANK"]).touch()

    before = {*psutil.Process().children()}
    monkeypatch.setattr(where, with_an_interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(function, method="fork")
    assert list(tmp_path.iterdir()) == []
    deadline = time.monotonic() + 20.0
    while (left := {*psutil.Process().children()} - before) and time.monotonic() < deadline:
        time.sleep(0.02)  # another thread waits for it
    assert left == set()


def test_a_rank_that_cannot_be_forked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = []
    fork = os.fork

    def fails_the_third_time() -> int:
        forks.append(1)
        if len(forks) == 3:  # here, in the server, and once more in the server
            raise BlockingIOError(errno.EAGAIN, "no room")
        return fork()

    monkeypatch.setattr(os, "fork", fails_the_third_time)
    with pytest.raises(StartError, match="forked: no room") as caught:
        launch(time.sleep, 600, method="fork")
    assert "rank 1" in str(caught.value.__cause__)


def test_a_rank_for_which_too_many_files_are_open_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = []
    pipe = os.pipe

    def fails_the_third_time() -> tuple[int, int]:
        pipes.append(1)
        if len(pipes) == 3:
            raise OSError(errno.EMFILE, "too many")
        return pipe()

    monkeypatch.setattr(os, "pipe", fails_the_third_time)
    with pytest.raises(OSError, match="too many"), end_reports() as ends:  # the fixtures look for what is left
        LocalRank(0, ends=ends, store_fd=os.dup(0))


def test_an_interrupt_while_the_ends_of_a_rank_are_closed_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with end_reports() as ends:
        handle, close = LocalRank(0, ends=ends, store_fd=os.dup(0)), os.close

    def interrupted(fd: int) -> None:
        signal.raise_signal(signal.SIGINT)
        close(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.handed_over(0, lambda _: None, None)  # type: ignore[arg-type]
    handle.close()  # the fixtures look for what is left


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_ranks_know_from_the_start_whether_their_bars_are_rows(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> bool:
        wanted = here().wants_rows
        Path(tmp_path, os.environ["RANK"]).touch()
        return wanted

    def late(*args: Any, **options: Any) -> Any:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)  # as above
        return make_panel(*args, **options)

    monkeypatch.setattr("nb_accelerate.notebook.launch.launch.make_panel", late)
    assert notebook_launcher(function, (), 2, start_method=method, progress="text", timeout=45) == [True, True]


@pytest.mark.contract("a launch: inline")
def test_inline_runs_in_this_very_process_with_the_real_objects() -> None:
    lock = threading.Lock()
    assert launch(lambda: (os.getpid(), lock), method="inline") == [(os.getpid(), lock)]


def test_inline_is_one_rank() -> None:
    with pytest.raises(ConfigError, match="Write num_processes=1"):
        notebook_launcher(print, (), 2, start_method="inline")


def test_a_fork_shares_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    assert launch(lambda: lock.acquire(blocking=False), method="fork") == [True, True]
    assert lock.acquire(blocking=False)  # theirs were copies


MANY_FILES = """
import os, resource
from nb_accelerate import notebook_launcher

limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if limit == resource.RLIM_INFINITY else min(4096, limit), limit))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
for method in ("fork", "forkserver"):
    print(notebook_launcher(lambda: int(os.environ["RANK"]), (), 2, start_method=method, progress="off"))
"""


@pytest.mark.slow
def test_a_process_with_more_files_open_than_select_can_name_launches_too() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MANY_FILES],
        capture_output=True,
        text=True,
        timeout=45,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("[0, 1]") == 2


WITHOUT_STREAMS = """
import os, sys
for fd in (0, 1, 2):
    os.close(fd)
from nb_accelerate import notebook_launcher

def rank():
    print("heard")
    os.write(2, b"heard too\\n")
    return os.environ["RANK"], sorted(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in range(3))

try:
    found = notebook_launcher(rank, (), 2, start_method=sys.argv[1], progress="off")
except BaseException as error:
    found = error
with open(sys.argv[2], "w") as file:
    print(found, file=file)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="there is no list of descriptors")
@pytest.mark.parametrize("method", [pytest.param("fork", marks=pytest.mark.slow), "forkserver", METHODS[2]])
def test_a_process_without_standard_streams_launches_too(method: str, tmp_path: Path) -> None:
    # What it opens then has numbers that every rank redirects.
    result = tmp_path / "result"
    subprocess.run([sys.executable, "-c", WITHOUT_STREAMS, method, str(result)], timeout=45, check=False)
    streams = ["/dev/null", "pipe", "pipe"]
    assert result.read_text() == f"{[(str(rank), streams) for rank in range(2)]}\n"


def test_a_forked_rank_has_nothing_of_another_ones() -> None:
    def function() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return {link for link in found if link.startswith(("pipe:", "socket:"))}

    ours = function()
    first, second = launch(function, method="fork")
    assert (first & second) <= ours


def test_launches_of_several_threads_inherit_nothing_of_one_another() -> None:
    import torch  # noqa: F401 - as a notebook has: ranks then need not import it

    together = threading.Barrier(3)

    def function() -> tuple[set[str], set[str]]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return {os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2)}, found  # its output, which is its alone

    def launch_together() -> list[Any]:
        together.wait()
        return launch(function, method="fork")

    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            launches = [pool.submit(launch_together) for _ in range(3)]
            ranks = [rank for one in launches for rank in one.result()]
        for number, (own, _) in enumerate(ranks):
            others = [found for other, (_, found) in enumerate(ranks) if other != number]
            assert not any(own & found for found in others)


def test_variables_that_scikit_learn_sets_as_it_is_imported_leave_the_warm_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK", raising=False)
    monkeypatch.delenv("KMP_INIT_AT_FORK", raising=False)
    before = servers.warm_server().pid
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")
    assert servers.warm_server().pid == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="subprocess knows process groups since Python 3.11")
def test_a_server_is_not_in_the_group_of_its_kernel_from_its_first_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "subprocess", subprocess)  # a new interpreter, not a fork
    server = servers.ExecutedServer(())
    try:
        assert os.getpgid(server.pid) == server.pid
    finally:
        server.close()
