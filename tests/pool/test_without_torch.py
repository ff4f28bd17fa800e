"""What the extension says where PyTorch is not installed: a kernel of an environment that has everything else."""

from __future__ import annotations

import contextlib
import site
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

import nb_accelerate

_TORCH = ("torch", "functorch")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    home = tmp_path_factory.mktemp("without-torch")
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    folders = map(Path, site.getsitepackages())  # Debian's Python names some that are not there
    for folder in filter(Path.is_dir, folders):
        for entry in folder.iterdir():
            if not entry.name.startswith(_TORCH) and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    if not (packages / "nb_accelerate").exists():
        (packages / "nb_accelerate").symlink_to(Path(nb_accelerate.__file__).parent)
    one = Kernel(home / "bin" / "python")
    with contextlib.closing(one):
        assert one.run("import torch").error == "ModuleNotFoundError"
        yield one


@pytest.mark.contract("cells: without torch")
def test_the_extension_loads_and_its_help_works(without_torch: Kernel):
    cell = without_torch.run("%load_ext nb_accelerate").ok()
    assert (cell.stdout, cell.stderr) == ("", "")
    assert "--group-outputs" in without_torch.run("%%distributed --help\n").ok().stdout
    assert without_torch.run("%distributed status").ok().stdout == "no ranks are running\n"


@pytest.mark.parametrize("code", ["%%distributed\nprint(rank)", "%distributed start", "%%rank 1\nprint(rank)"])
def test_what_needs_ranks_says_in_one_line_what_to_install(without_torch: Kernel, code: str):
    cell = without_torch.run(code)
    assert cell.error == "MissingDependencyError"
    assert "pip install torch" in cell.message
    assert len(cell.traceback.splitlines()) == 1
    assert without_torch.run("1 + 1").ok().value == "2"


def test_so_does_a_function_for_programs(without_torch: Kernel):
    cell = without_torch.run("from nb_accelerate.notebook import pool\npool.run('rank')")
    assert (cell.error, "pip install torch" in cell.message) == ("MissingDependencyError", True)


def test_unloading_leaves_nothing(without_torch: Kernel):
    without_torch.run("%unload_ext nb_accelerate").ok()
    assert without_torch.processes() == []
