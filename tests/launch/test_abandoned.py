"""Folders of ranks, and how soon a server ends whose kernel was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nb_accelerate.notebook.launch.servers import ExecutedServer
from nb_accelerate.notebook.worker.server.scratch import Scratch, new_path


@contextlib.contextmanager
def watched(pid: int) -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits so many seconds for the end of a process, whoever is to reap it, and whenever."""
    process = os.pidfd_open(pid)
    try:
        yield lambda seconds: bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


can_watch = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="a process that is not a child cannot be watched")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_there_is_a_folder_as_long_as_there_are_ranks(folder: Path):
    ranks = Scratch(new_path())
    first, second = (Path(ranks.make(name)) for name in "01")
    (first / "socket").touch()
    ranks.remove("0")
    assert not first.exists()
    assert second.is_dir()
    ranks.remove("1")
    assert list(folder.iterdir()) == []
    assert Path(ranks.make("2")).is_dir()
    ranks.remove("2")
    assert list(folder.iterdir()) == []


def test_sockets_of_multiprocessing_fit_into_it_however_long_the_path_of_the_temporary_folder_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    deep = folder / ("x" * 72)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    ranks = Scratch(new_path())
    path = ranks.make("1234")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path}/listener-12345678")
    finally:
        ranks.remove("1234")
    assert not Path(path).parent.exists()


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
