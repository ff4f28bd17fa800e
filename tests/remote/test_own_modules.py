"""Modules of the notebook that a machine lacks, or has in another version: what is sent of them works there."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.pool.options import CellOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixtures.engines import Machines

MODULE = """
import dataclasses

FACTOR = {factor}

@dataclasses.dataclass
class Kept:
    number: int

def scaled(number):
    return Kept(FACTOR * number)
"""


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in a folder of the search path."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "scaling_of_user.py").write_text(MODULE.format(factor=3))
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("scaling_of_user")
    del sys.modules["scaling_of_user"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package in a folder that a machine has under another name."""
    folder = tmp_path / "only here" / "package_of_user"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .parts import part\n")
    (folder / "parts.py").write_text("def part(number):\n    return 3 * number\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.import_module("package_of_user")
    yield folder
    for name in ("package_of_user", "package_of_user.parts"):
        del sys.modules[name]


def launched(helpers: Any) -> list[Any]:
    scaled = helpers.scaled
    return notebook_launcher(lambda: scaled(int(os.environ["RANK"])), progress="text")


@pytest.mark.slow
def test_a_module_that_machines_do_not_have_is_sent_and_that_is_said_once(
    machines: Machines, helpers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "project")
    for _ in range(2):
        assert launched(helpers) == [helpers.Kept(3 * rank) for rank in range(3)]
    said = capfd.readouterr()
    assert (said.out + said.err).count("scaling_of_user.py") == 2  # each machine


@pytest.mark.slow
def test_code_that_imports_such_a_module_there_gets_it(
    machines: Machines, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or os.environ["NB_ACCELERATE_ENGINE"] != "command":
        pytest.skip("needs root, and a command")

    def imports() -> tuple[int, str]:
        import inspect

        import package_of_user.parts
        from package_of_user import part

        return part(int(os.environ["RANK"])), inspect.getsource(package_of_user.parts.part)

    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv(
        "NB_ACCELERATE_COMMAND_TEMPLATE",
        f"unshare -m sh -c 'mount --bind {tmp_path}/nothing \"{package.parent}\" && OWN={{host}} {{command}}'",
    )
    source = "def part(number):\n    return 3 * number\n"
    assert notebook_launcher(imports, progress="off") == [(3 * rank, source) for rank in range(3)]
    pool = Pool()
    pool.start()
    try:
        options = CellOptions(wants_values=True, progress="off")
        cell = "import package_of_user\npackage_of_user.part(rank)"
        assert pool.run(read_cell(cell), options, variables={}) == [0, 3, 6]
    finally:
        pool.stop()


@pytest.mark.slow
def test_cells_get_it_too(machines: Machines, helpers: Any, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "project")
    pool = Pool()
    pool.start()
    try:
        for cell, variables in {
            "helpers.scaled(rank).number": {"helpers": helpers},
            "scaled(rank).number": {"scaled": helpers.scaled},
        }.items():
            options = CellOptions(wants_values=True, progress="off")
            assert pool.run(read_cell(cell), options, variables=variables) == [0, 3, 6]
    finally:
        pool.stop()


@pytest.mark.slow
def test_a_machine_with_another_version_runs_that_of_the_notebook(
    machines: Machines,
    helpers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if os.geteuid() != 0 or os.environ["NB_ACCELERATE_ENGINE"] != "command":
        pytest.skip("needs root, and a command")
    monkeypatch.setenv("NB_ACCELERATE_REMOTE_PYTHON", sys.executable)  # which sees the mounts of the machine
    assert launched(helpers) == [helpers.Kept(3 * rank) for rank in range(3)]
    assert "as here" not in "".join(capfd.readouterr())
    other = tmp_path / "other"
    other.mkdir()
    (other / "scaling_of_user.py").write_text(MODULE.format(factor=5))
    mount = f"mount --bind {other} {tmp_path / 'project'}"
    monkeypatch.setenv(
        "NB_ACCELERATE_COMMAND_TEMPLATE",
        f"unshare -m sh -c 'cd {tmp_path}/{{host}} && {mount} && OWN={{host}} {{command}}'",
    )
    assert launched(helpers) == [helpers.Kept(3 * rank) for rank in range(3)]
    assert "scaling_of_user.py" in "".join(capfd.readouterr())
