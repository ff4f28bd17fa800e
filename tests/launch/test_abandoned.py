"""What is left of a server that was killed, and how soon one ends whose kernel was."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nb_accelerate.notebook.launch.servers import ExecutedServer
from nb_accelerate.notebook.worker.server import scratch
from nb_accelerate.notebook.worker.server.scratch import Scratch, remove_abandoned

LAUNCH = """
import os, sys, time
from nb_accelerate.notebook.launch import notebook_launcher

def rank(waits):
    # The server, and where multiprocessing would put its files.
    import multiprocessing.util
    print(os.getppid(), multiprocessing.util.get_temp_dir(), flush=True)
    if waits:
        time.sleep(600)

notebook_launcher(rank, (bool(sys.argv[1:]),), 1, start_method="fork", progress="off")
"""


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A process with a rank that runs; its server's process and its rank's folder."""
    command = [sys.executable, "-u", "-c", LAUNCH, *arguments]  # what a rank prints comes at once
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server, folder = process.stdout.readline().split()
            yield process, int(server), Path(folder)
        finally:
            process.kill()


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits so many seconds for the end of a process, whoever is to reap it, and whenever."""
    process = os.pidfd_open(pid)
    try:
        yield lambda seconds: bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


can_watch = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a process that is not a child cannot be watched")


@pytest.mark.slow
@can_watch
def test_the_next_server_removes_the_folder_of_one_that_was_killed_and_of_no_other():
    with launched("waits") as (_, _, living), launched("waits") as (kernel, server, left):
        assert living.is_dir()
        with watched(server) as has_ended:
            os.kill(server, signal.SIGKILL)
            kernel.kill()
            assert has_ended(30.0)
        assert left.is_dir()
        assert living.parent != left.parent
        with launched() as (next_one, _, own):
            assert next_one.wait() == 0
            assert not own.parent.exists()
        assert not left.parent.exists()
        assert living.is_dir()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files. Its path is so short that ranks' folders are made there, and not in /tmp."""
    with tempfile.TemporaryDirectory(prefix="nb-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_there_is_a_folder_as_long_as_there_are_ranks(folder: Path):
    ranks = Scratch()
    first, second = (Path(ranks.make(name)) for name in "01")
    (first / "socket").touch()
    remove_abandoned()
    assert (first / "socket").exists()
    assert second.is_dir()
    ranks.remove("0")
    assert not first.exists()
    assert second.is_dir()
    ranks.remove("1")
    assert list(folder.iterdir()) == []
    assert Path(ranks.make("2")).is_dir()
    ranks.remove("2")
    assert list(folder.iterdir()) == []


def test_what_is_not_a_servers_or_not_ours_stays(folder: Path):
    (folder / "nb-ranks-file").touch()
    (folder / "other").mkdir()
    (folder / "nb-ranks-link").symlink_to(folder / "other")
    there = set(folder.iterdir())
    left_behind()
    remove_abandoned()
    assert set(folder.iterdir()) == there


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to somebody else")
def test_what_belongs_to_another_user_stays(folder: Path):
    theirs = left_behind()
    os.chown(theirs, 12345, -1)
    remove_abandoned()
    assert theirs.is_dir()


def test_a_folder_is_not_taken_for_an_abandoned_one_before_it_is_locked(folder: Path, monkeypatch: pytest.MonkeyPatch):
    make = tempfile.mkdtemp

    def make_while_others_remove(**given: str) -> str:
        made = make(**given)
        remove_abandoned()
        return made

    monkeypatch.setattr(tempfile, "mkdtemp", make_while_others_remove)
    ranks = Scratch()
    assert Path(ranks.make("0")).is_dir()
    ranks.remove("0")
    assert list(folder.iterdir()) == []


def left_behind() -> Path:
    """What a server leaves that was killed."""
    killed = Scratch()
    path = Path(killed.make("0"))
    killed.leave()
    return path.parent


def test_a_folder_of_the_users_own_stays_whatever_its_name(folder: Path):
    own = folder / "nb-ranks-results"
    own.mkdir()
    (own / "numbers.csv").touch()
    linked = folder / "nb-ranks-linked"
    linked.mkdir()
    (linked / scratch._MARKER).symlink_to(own / "numbers.csv")
    left = left_behind()
    remove_abandoned()
    assert not left.exists()
    assert (own / "numbers.csv").exists()
    assert linked.is_dir()


@pytest.mark.slow
def test_many_who_remove_at_once_never_take_a_living_ones(folder: Path):
    is_over = threading.Event()

    def remove() -> None:
        while not is_over.is_set():
            remove_abandoned()

    threads = [threading.Thread(target=remove) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            ranks = Scratch()
            path = Path(ranks.make("0"))
            (path / "socket").touch()  # fails if the folder is not there
            ranks.remove("0")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    remove_abandoned()
    assert list(folder.iterdir()) == []


def test_where_folders_cannot_be_locked_they_are_used_and_nothing_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def cannot(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(scratch.fcntl, "flock", cannot)
    ranks = Scratch()
    path = Path(ranks.make("0"))
    remove_abandoned()
    assert path.is_dir()
    ranks.remove("0")
    assert list(folder.iterdir()) == []


def test_sockets_of_multiprocessing_fit_into_it_however_long_the_path_of_the_temporary_folder_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = folder / ("x" * 72)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    ranks = Scratch()
    path = ranks.make("1234")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}/listener-12345678")
    finally:
        ranks.remove("1234")
    assert not Path(path).parent.exists()
    left = left_behind()
    remove_abandoned()
    assert not left.exists()


IMPORTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from nb_accelerate.notebook.launch.servers import ExecutedServer
server = ExecutedServer(("takes_long",))
print(server.pid, flush=True)
sys.stdin.read()
"""


@can_watch
@pytest.mark.parametrize("what", ["time.sleep(600)", "while True: pass"])
def test_a_server_that_is_still_importing_ends_with_its_kernel(tmp_path: Path, what: str):
    said = tmp_path / "said"
    os.mkfifo(said)
    (tmp_path / "takes_long.py").write_text(f"import time\nopen({str(said)!r}, 'w').close()\n{what}\n")
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
        assert kernel.stdout is not None
        server = int(kernel.stdout.readline())
        said.read_text()  # until the import has begun
        with watched(server) as has_ended:
            kernel.kill()
            is_in_time = has_ended(30.0)  # nothing else would end it
            if not is_in_time:
                os.kill(server, signal.SIGKILL)
        assert is_in_time


LOOKS = """
import os, threading, time
def tell():
    names = [thread.name for thread in threading.enumerate()]
    deadline = time.monotonic() + 30
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread that has been joined may still be listed for a moment
    with open({said!r}, "w") as file:
        print(*names, len(os.listdir("/proc/self/task")), file=file)
os.register_at_fork(before=tell)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_when_a_server_forks_there_is_no_thread_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = tmp_path / "said"
    os.mkfifo(said)
    (tmp_path / "looks.py").write_text(LOOKS.format(said=str(said)))
    monkeypatch.syspath_prepend(tmp_path)
    server = ExecutedServer(("looks",))
    try:
        # At the fork of the first idle process. The next one may write before the pipe is closed here.
        assert said.read_text().splitlines()[0] == "MainThread 1"
    finally:
        os.kill(server.pid, signal.SIGKILL)  # another fork may be waiting for somebody who reads
        server.close()
