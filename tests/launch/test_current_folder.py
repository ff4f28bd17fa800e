"""Nothing is imported from the current folder but by users' code, whose path says so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.kernels import Kernel
from fixtures.ranks import wait_for_warm_server

import nb_accelerate
from nb_accelerate import notebook_launcher
from nb_accelerate.notebook.launch.servers import close_warm_server
from nb_accelerate.notebook.worker.server.interpreter import command, own_path

PLANTED = """
import os
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a") as file:
    print(__name__, file=file)
"""

NAMES = (
    *("sitecustomize", "usercustomize", "linecache", "json", "queue", "socket", "selectors", "tokenize"),
    *("multiprocessing", "cloudpickle", "gmpy2", "IPython", "nb_accelerate", "numpy", "psutil", "torch", "tqdm"),
    *("traitlets", "typing_extensions"),
)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of somebody else's, with modules of names that are imported wherever ranks are started."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(PLANTED)
    (folder / "beside.py").write_text("value = 5\n")
    if os.geteuid() == 0:
        for path in (*folder.iterdir(), folder):
            os.chown(path, 12345, -1)
    return folder


@pytest.fixture
def _in_shared(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    close_warm_server()  # it is where it was started
    monkeypatch.chdir(shared)
    yield
    close_warm_server()


def rank() -> tuple[str, str, bool]:
    import json

    return os.environ["RANK"], json.__name__, "" in sys.path


DEARER = ("forkserver", "spawn")


@pytest.mark.usefixtures("_in_shared")
@pytest.mark.parametrize("method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in DEARER)])
def test_a_launch_runs_nothing_of_the_current_folder(method: str, shared: Path) -> None:
    values = notebook_launcher(rank, (), 2, start_method=method, progress="off", timeout=45)
    assert values == [("0", "json", False), ("1", "json", False)]
    assert not (shared / "ran").exists()


@pytest.mark.usefixtures("_in_shared")
@pytest.mark.parametrize("where", [pytest.param("", marks=pytest.mark.slow), ".", "absolute"])
def test_a_rank_imports_what_lies_beside_the_notebook(
    where: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> int:
        import beside

        return int(beside.value)

    # As in a kernel: after the standard library, before all else that is installed.
    stdlib = sys.path.index(os.path.dirname(os.__file__))
    entry = str(shared) if where == "absolute" else where
    monkeypatch.setattr(sys, "path", [*sys.path[: stdlib + 2], entry, *sys.path[stdlib + 2 :]])
    if where == "":  # else a rank imports what its first optimizer needs, which looks for gmpy2 where the notebook does
        wait_for_warm_server()
    for method in ("fork", "forkserver") if where == "" else ("fork",):
        assert notebook_launcher(function, (), 1, start_method=method, progress="off", timeout=45) == [5]
    assert entry not in own_path()
    assert not (shared / "ran").exists()


ENTRY = """
def main():
    import json, sys
    print(json.__file__, sys.argv[1:], sys.path[-1])
"""


@pytest.mark.parametrize("has_flag", [True, False])
def test_a_fresh_interpreter_is_safe_before_its_first_import(has_flag: bool, shared: Path, tmp_path: Path) -> None:
    # Python 3.10 has no -P. From 3.13 on Python itself imports linecache before it begins with what -c says.
    if not has_flag and sys.version_info >= (3, 13):
        pytest.skip("this Python has the flag, and needs it")
    (tmp_path / "entry.py").write_text(ENTRY)
    words = command("entry:main", ["a", "b"], [*own_path(), str(tmp_path)])
    ran = subprocess.run(
        [word for word in words if has_flag or word != "-P"],
        cwd=shared,
        capture_output=True,
        text=True,
        timeout=45,
        check=True,
    )
    where = os.path.join(os.path.dirname(os.__file__), "json", "__init__.py")
    assert ran.stdout == f"{where} ['a', 'b'] {tmp_path}\n"
    assert not (shared / "ran").exists()


def test_the_path_of_this_package_is_the_kernels_without_the_current_folder(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard = list(sys.path)
    monkeypatch.chdir(shared)
    added = [tmp_path / "not text", "", ".", str(shared), str(shared / ".." / "shared"), "../relative"]
    monkeypatch.setattr(sys, "path", [*added, *standard])
    assert own_path() == [str(shared / "../relative"), *standard]
    # Where the package is found in no other folder, that one comes last.
    root = os.path.dirname(os.path.dirname(nb_accelerate.__file__))
    monkeypatch.setattr(sys, "path", ["", *(path for path in standard if path != root)])
    monkeypatch.chdir(root)
    assert own_path() == [*(path for path in standard if path != root), root]


EVERYTHING_IS_HERE = """
import os, sys
sys.path.append("")
from nb_accelerate import notebook_launcher

def rank():
    import torch
    return os.path.dirname(os.path.dirname(torch.__file__)) == os.getcwd()

for method in sys.argv[1:]:
    print(notebook_launcher(rank, (), 1, start_method=method, progress="off", timeout=45))
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_packages_that_lie_in_the_current_folder_and_nowhere_else_are_found(tmp_path: Path) -> None:
    site = Path(sys.modules["psutil"].__file__ or "").parents[1]
    for path in (*site.iterdir(), Path(nb_accelerate.__file__).parent):
        if not (tmp_path / path.name).exists():
            (tmp_path / path.name).symlink_to(path)
    ran = subprocess.run(
        [sys.executable, "-S", "-c", EVERYTHING_IS_HERE, "spawn", "forkserver"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout == "[True]\n" * 2, ran.stderr


@pytest.mark.slow
def test_fresh_ranks_of_a_pool_run_nothing_of_the_current_folder(kernel: Kernel, shared: Path) -> None:
    kernel.run(f"%load_ext nb_accelerate\nimport os\nos.chdir({str(shared)!r})").ok()
    kernel.run("%distributed start -n 1 --start-method spawn").ok()
    assert kernel.run("%%distributed\nimport beside\nprint(beside.value)").ok().stdout == "5\n"
    assert not (shared / "ran").exists()


WHOSE_PACKAGE = """
import os, sys
sys.path.insert(0, "")
import nb_accelerate
assert os.path.samefile(os.path.dirname(os.path.dirname(nb_accelerate.__file__)), ".")

def rank():
    import nb_accelerate
    return os.path.samefile(os.path.dirname(os.path.dirname(nb_accelerate.__file__)), ".")

try:
    for method in sys.argv[1:]:
        print(nb_accelerate.notebook_launcher(rank, (), 1, start_method=method, progress="off", timeout=45))
except nb_accelerate.errors.StartError as error:
    print("refused", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("methods", [["fork", "forkserver"], pytest.param(["spawn"], marks=pytest.mark.slow)])
def test_ranks_have_the_package_of_the_kernel_where_the_current_folder_is_named(
    methods: list[str], tmp_path: Path
) -> None:
    shutil.copytree(Path(nb_accelerate.__file__).parent, tmp_path / "nb_accelerate")
    (tmp_path / "nb_accelerate" / "changed.py").touch()

    def say(**variables: str) -> str:
        words = [sys.executable, "-c", WHOSE_PACKAGE, *methods]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        ran = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=True)
        return ran.stdout

    refused = say()
    assert refused.startswith("refused ")
    [(name, value)] = re.findall(r"(PYTHONPATH)=(\S+)$", refused)
    assert say(**{name: value}) == "[True]\n" * len(methods)
