"""Too few files, processes or threads are allowed: a sentence says which limit it is, and nothing is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch import notebook_launcher, servers
from nb_accelerate.notebook.launch.servers import close_warm_server

LAUNCH = """
import os, resource, sys
from nb_accelerate import notebook_launcher
from nb_accelerate.errors import StartError
import torch  # as a notebook has

def opened():
    return len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0

kind, method, *numbers = sys.argv[1:]
before = opened()
for number in numbers:
    limit = getattr(resource, kind)
    resource.setrlimit(limit, (int(number), resource.getrlimit(limit)[1]))
    try:
        values = notebook_launcher(int, ("3",), 2, start_method=method, progress="off")
        print(values)
    except StartError as error:
        print(str(error).partition(" (ulimit")[0])
    assert opened() == before or method == "forkserver", os.listdir("/proc/self/fd")
import nb_accelerate.notebook.launch
nb_accelerate.notebook.launch.close()
"""


def launched(words: list[str], folder: Path, *limits: str) -> list[str]:
    ran = subprocess.run(
        [*words, sys.executable, "-c", LAUNCH, *limits],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert list(folder.iterdir()) == []
    return ran.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_too_few_files_are_a_sentence_and_leave_nothing(method: str, tmp_path: Path) -> None:
    limits = ("12", "16", "24")
    said = launched([], tmp_path, "RLIMIT_NOFILE", method, *limits, "4096")
    sentence = "ranks cannot be started: too many files are open. One process may open"
    assert said == [*(f"{sentence} {number}" for number in limits), "[3, 3]"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs a user without other processes")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_too_few_processes_are_a_sentence_and_leave_nothing(method: str, tmp_path: Path) -> None:
    # Nobody, but one who may read where Python and this package lie.
    user = ["--reuid", "54321", "--regid", "54321", "--clear-groups"]
    may_read = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    tmp_path.chmod(0o777)
    limits = ("1", "2", "3")  # the kernel, the server and two ranks are four
    said = launched(["setpriv", *user, *may_read], tmp_path, "RLIMIT_NPROC", method, *limits)
    for number, sentence in zip(limits, said, strict=True):
        assert sentence.endswith(f"This user may have {number} of both")


@pytest.mark.slow
def test_a_warm_server_that_has_no_room_for_a_rank_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_room.py").write_text(
        "import errno, os\n"
        "fork = os.fork\n"
        "def fail():\n"
        "    if os.path.exists(__file__ + '.full'):\n"
        "        raise BlockingIOError(errno.EAGAIN, 'no room')\n"
        "    return fork()\n"
        "os.fork = fail\n"
    )
    full = tmp_path / "no_room.py.full"
    full.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(servers, "PRELOAD", ("no_room",))
    close_warm_server()
    try:
        with pytest.raises(StartError, match="forked: no room"):
            notebook_launcher(os.getppid, (), 2, start_method="forkserver", progress="off", timeout=45)
        server = servers.warm_server().pid
        full.unlink()
        launched_again = notebook_launcher(os.getppid, (), 1, start_method="forkserver", progress="off", timeout=45)
        assert launched_again == [server]
    finally:
        close_warm_server()


FEW_FILES = """
import os, resource
%load_ext nb_accelerate
before = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 14, before[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_pool_for_which_too_few_files_are_allowed_starts_when_there_are_more(kernel: Kernel) -> None:
    kernel.run(FEW_FILES).ok()
    cell = kernel.run("%distributed start -n 4")
    assert cell.error == "StartError"
    assert "too many files are" in cell.message
    kernel.run("resource.setrlimit(resource.RLIMIT_NOFILE, before)").ok()
    assert "6" in kernel.run("%%distributed\nprint(6)").ok().stdout
