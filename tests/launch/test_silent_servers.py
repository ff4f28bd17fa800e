"""The process that starts ranks does not answer, or ends before it could tidy up: nobody waits, nothing is left."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch  # noqa: F401 - as a notebook has: a forked rank then need not import it

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch import notebook_launcher, servers
from nb_accelerate.notebook.launch.launch import Launch
from nb_accelerate.notebook.launch.servers import close_warm_server, warm_server

METHODS = ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]
ALL_METHODS = [*METHODS, pytest.param("spawn", marks=pytest.mark.slow)]
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs process descriptors and a list of children")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Flags:
    """Files by which ranks say that they are there, and are told to go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def wait(self, number: int = 2) -> None:
        while len(list(self.folder.iterdir())) < number:
            time.sleep(0.01)  # there is no event for what another process writes


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    (tmp_path / "flags").mkdir()
    return Flags(tmp_path / "flags")


def begin(method: str, flags: Flags) -> tuple[Launch, int]:
    """A launch of two ranks that run; its server."""

    def function() -> None:
        Path(flags.folder, os.environ["RANK"]).touch()
        time.sleep(600)

    launch: Any = notebook_launcher(function, (), 2, start_method=method, progress="off", block=False)
    flags.wait()
    return launch, psutil.Process(launch.ranks[0].pid).ppid()


def are_gone(launch: Launch, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while left := [rank.pid for rank in launch.ranks if rank.pid is not None and runs(rank.pid)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)  # there is no event for the end of somebody else's process
    return not left


def runs(pid: int) -> bool:
    """A server that was stopped does not bury its ranks."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The warm server imports this until it is let go on; the function waits until it has begun."""
    said, gate = tmp_path / "said", tmp_path / "gate"
    for path in (said, gate):
        os.mkfifo(path)
    (tmp_path / "takes_long.py").write_text(f"open({str(said)!r}, 'w').close()\nopen({str(gate)!r}).close()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(servers, "PRELOAD", ("takes_long",))
    close_warm_server()
    yield lambda: Path(said).read_text() and None
    close_warm_server()


@pytest.mark.slow
def test_an_interrupt_of_the_first_launch_does_not_wait_until_all_is_imported(
    takes_long: Callable[[], None], tmp_path: Path
) -> None:
    def function(path: Path) -> int:
        path.touch()
        return os.getppid()

    begun = tmp_path / "begun"
    launch: Any = notebook_launcher(function, (begun,), 2, start_method="forkserver", progress="off", block=False)
    takes_long()
    server = warm_server().pid
    launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.result(30.0)
    with open(tmp_path / "gate", "w"):  # now it goes on
        pass
    # The next launch has it, and what was interrupted never runs.
    assert notebook_launcher(os.getppid, (), 1, start_method="forkserver", progress="off", timeout=45) == [server]
    assert not begun.exists()


BROKEN = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ImportError("broken on purpose")

sys.meta_path.insert(0, Broken())
"""


@pytest.mark.slow
def test_folders_that_torch_makes_when_it_is_imported_end_with_the_server() -> None:
    close_warm_server()
    before = os.listdir(tempfile.gettempdir())
    assert wait([warm_server()._channel.fileno()], 45)  # it has imported all that it can
    close_warm_server()
    assert os.listdir(tempfile.gettempdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize("module", ["nb_accelerate.training.checkpoint.sharded", "nb_accelerate.training.accelerator"])
def test_a_module_that_the_server_cannot_import_fails_only_who_needs_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(name: str) -> None:
        importlib.import_module(name)

    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(module=module))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    close_warm_server()
    try:
        server = warm_server()
        assert wait([server._channel.fileno()], 45)  # it has imported all that it can, as an idle one does
        assert notebook_launcher(os.getppid, (), 1, start_method="forkserver", progress="off") == [server.pid]
        with pytest.raises(ImportError, match="broken on purpose"):
            notebook_launcher(needs, (module,), 1, start_method="forkserver", progress="off")
        assert warm_server() is server
    finally:
        close_warm_server()


def test_a_server_that_is_still_importing_is_not_waited_for(
    takes_long: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "CLOSE_TIMEOUT", 600.0)
    monkeypatch.setenv("NB_ACCELERATE_KEEP_WARM", "0")
    launch: Any = notebook_launcher(int, (), 1, start_method="forkserver", progress="off", block=False)
    takes_long()
    launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.result(30.0)


def test_a_start_without_progress_ends_and_says_where_it_was_and_how_to_wait_longer(
    takes_long: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launch, "timeouts", replace(Launch.timeouts, start=0.4))
    with pytest.raises(StartError, match=r"\b0 and 1\b.*\(importing torch\)") as caught:
        notebook_launcher(int, (), 2, start_method="forkserver", progress="off")
    exec(str(caught.value).partition("To wait longer: ")[2])
    assert Launch.timeouts.start == 2


@pytest.mark.slow
def test_ranks_are_waited_for_as_long_as_an_import_computes(
    takes_long: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Launch, "timeouts", replace(Launch.timeouts, start=0.2))
    go_on = tmp_path / "go-on"
    (tmp_path / "takes_long.py").write_text(f"import os\nwhile not os.path.exists({str(go_on)!r}): pass\n")
    launch: Any = notebook_launcher(int, ("3",), 1, start_method="forkserver", progress="off", block=False)
    said = ""
    while "rank 0 still starts after 0.2 s (importing torch)" not in said:
        assert not launch.wait(0.02), launch
        said += capsys.readouterr().err
    go_on.touch()
    assert launch.result(30.0) == [3]


def test_ends_are_told_where_sigchld_is_blocked(method: str) -> None:
    close_warm_server()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    try:
        blocked = notebook_launcher(
            lambda: signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            (),
            2,
            start_method=method,
            progress="off",
            timeout=45,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        close_warm_server()
    assert blocked == [False, False]


FORK_AND_EXIT = """
open(LOCK, "+<", $ARGV[0]); flock(LOCK, 2);
print "begun\\n"; close(STDOUT);
$end = time() + 40;
while (time() < $end) { exit if fork }
open(END, ">", "$ARGV[0].end");
"""
"""Processes that live no longer than it takes to have a child, all with a lock. In Perl, which is quick at it."""


@only_linux
@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_children_that_fork_and_exit_for_ever_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nb_accelerate.notebook.worker.server.server._KILL_ORPHANS_TIMEOUT", 30.0
    )  # however little of a processor it is given

    def function() -> None:
        for number in range(4):
            file = tmp_path / f"{os.environ['RANK']}-{number}"
            file.touch()
            # One end of the pipe is there as long as any of them, so only the first line is read.
            with subprocess.Popen(["perl", "-e", FORK_AND_EXIT, file], stdout=subprocess.PIPE) as first:
                assert first.stdout is not None
                first.stdout.readline()

    notebook_launcher(function, (), 2, start_method="fork", progress="off", timeout=45)
    for number in range(8):
        file = tmp_path / f"{number // 4}-{number % 4}"
        with open(file, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not file.with_suffix(".end").exists()  # they did not end by themselves


OTHER_USER = """
import os, subprocess, sys, time
from nb_accelerate import notebook_launcher

def leaves_a_child():
    print("left", subprocess.Popen(["sleep", "600"], user=12345).pid, flush=True)
    return 5

def becomes_another():
    print("left", os.getpid(), flush=True)
    os.setresuid(12345, 12345, 12345)
    time.sleep(600)

for method in sys.argv[1:]:
    print(notebook_launcher(leaves_a_child, (), 2, start_method=method, progress="off"))
    try:
        notebook_launcher(becomes_another, (), 2, start_method=method, progress="off", timeout=20)
    except TimeoutError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_processes_of_another_user_end_no_server_and_are_not_waited_for(tmp_path: Path) -> None:
    # As children are that were started with sudo: without this capability root may not end those of others either.
    command = ["setpriv", "--bounding-set", "-kill", sys.executable, "-c", OTHER_USER, "forkserver"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    lines = ran.stdout.splitlines()
    left = re.findall(r"left (\d+)", ran.stdout)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    assert len(left) == 4, ran.stderr
    late = "the launch took longer than timeout=20 s; ranks 0-1 had not finished"
    assert [line for line in lines if " left " not in line] == ["[5, 5]", late], ran.stderr


FAMILY = """
import os, subprocess, sys, time
from nb_accelerate import notebook_launcher

def rank():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print(os.getppid(), os.getpid(), child.pid, flush=True)
    time.sleep(600)

notebook_launcher(rank, (), 1, start_method=sys.argv[1], progress="off")
"""


@contextlib.contextmanager
def family(method: str, folder: Path) -> Iterator[tuple[int, int, int, int]]:
    """A process that leads a session, as kernels do; its server, a rank, and a child of that in its own session."""
    command = [sys.executable, "-u", "-c", FAMILY, method]
    environ = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        pids: list[int] = []
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            server, rank, child = pids
            yield process.pid, server, rank, child
        finally:
            for pid in (process.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def has_ended(process: int, seconds: float = 30.0) -> bool:
    return bool(select.select([process], [], [], seconds)[0])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for temporary files whose path has room for those of multiprocessing."""
    with tempfile.TemporaryDirectory(prefix="nbt-", dir="/tmp") as folder:
        yield Path(folder)


@only_linux
def test_a_hard_shutdown_of_a_kernel_leaves_nothing_of_its_ranks(method: str, short_folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        kernel, *others = stack.enter_context(family(method, short_folder))
        server, rank, _ = others
        assert os.getpgid(rank) == kernel  # a signal to the whole group reaches it
        assert os.getpgid(server) == server
        assert os.getsid(server) == kernel
        watched = []
        for pid in others:
            watched.append(os.pidfd_open(pid))
            stack.callback(os.close, watched[-1])
        assert any(path.name.startswith("nb-ranks-") for path in short_folder.iterdir())
        os.killpg(kernel, signal.SIGKILL)
        assert [has_ended(one) for one in watched] == [True] * 3
        assert list(short_folder.iterdir()) == []


def test_a_server_that_was_killed_leaves_no_folder(method: str, flags: Flags) -> None:
    launch, server = begin(method, flags)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(StartError, match="forked from has ended"):
        launch.result(30.0)
    assert are_gone(launch)
    assert [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("nb-ranks-")] == []
