"""Installing the package changes nothing that is there, in whichever environment these tests run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from fixtures.distributions import ROOT, pip
from fixtures.kernels import Kernel

from nb_accelerate.base.config.versions import LOWEST, is_too_old

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixtures.distributions import Distributions

pytestmark = pytest.mark.limit(200)

# Without torch: pip would add the libraries of CUDA where it was installed without them.
REQUIREMENTS = [f"{name}>={version}" for name, version in LOWEST.items() if name != "torch"]

LAUNCH = """
import nb_accelerate

def where():
    import torch
    assert nb_accelerate.Accelerator(cpu=True).reduce(torch.ones(())) == 2
    return nb_accelerate.__file__

if __name__ == "__main__":
    print([nb_accelerate.__file__, *nb_accelerate.notebook_launcher(where, num_processes=2)])
"""


def _launch(python: str | Path, folder: Path, *, first: str = "", wrapper: tuple[str, ...] = ()) -> list[str]:
    """The files that the package of a Python, and of two ranks that it launches, is imported from."""
    script = folder / "script.py"
    script.write_text(first + LAUNCH)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [*wrapper, str(python), str(script)]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    files: list[str] = ast.literal_eval(run.stdout.splitlines()[-1])
    assert len(files) == 3
    return files


@pytest.mark.slow
def test_pip_would_change_no_version_that_is_installed(tmp_path: Path):
    installed = {one.name.lower().replace("_", "-") for one in metadata.distributions()}
    report = tmp_path / "report.json"
    pip(sys.executable, "install", "--dry-run", "--report", report, *REQUIREMENTS)
    planned = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    assert [one for one in planned if one["name"].lower().replace("_", "-") in installed] == []


def test_all_that_is_needed_is_here_in_a_version_that_works():
    assert [f"{name} {metadata.version(name)}" for name in LOWEST if is_too_old(name, metadata.version(name))] == []


@pytest.mark.slow
def test_pip_check_complains_of_nothing_more_with_the_package(distributions: Distributions, tmp_path: Path):
    pip(sys.executable, "install", "--no-index", "--no-deps", "--target", tmp_path / "ours", distributions.wheel)
    check = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    complaints = []
    for path in ("", str(tmp_path / "ours")):
        env = {**os.environ, "PYTHONPATH": path}
        run = subprocess.run(check, env=env, capture_output=True, text=True, timeout=100, check=False)
        complaints.append({line for line in run.stdout.splitlines() if line != "No broken requirements found."})
    assert complaints[1] - complaints[0] == set()


@pytest.mark.slow
def test_without_an_index_a_wheel_is_installed_and_launches(
    distributions: Distributions, make_bare_python: Callable[[], Path], tmp_path: Path
):
    python = make_bare_python()
    pip(python, "install", "--no-index", "--no-deps", distributions.wheel)
    files = _launch(python, tmp_path)
    assert {Path(file).is_relative_to(tmp_path / "bare") for file in files} == {True}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folder"), [("10_tpu_colab", "working"), ("11_tpu_kaggle", "input/wheels")])
def test_the_notebooks_for_tpus_install_the_wheel_that_the_reader_has(
    name: str,
    folder: str,
    distributions: Distributions,
    make_bare_python: Callable[[], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for one in ("working", folder):
        (tmp_path / one).mkdir(parents=True, exist_ok=True)
    shutil.copy(distributions.wheel, tmp_path / folder)
    cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
    (install,) = (cell.source for cell in cells if "%pip" in cell.source)
    monkeypatch.chdir(tmp_path / "working")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    kernel = Kernel(make_bare_python())
    try:
        assert kernel.run("import nb_accelerate").error == "ModuleNotFoundError"
        kernel.run(install).ok()
        file = kernel.run("import nb_accelerate; print(nb_accelerate.__file__)").ok().stdout.strip()
    finally:
        kernel.close()
    assert Path(file).is_relative_to(tmp_path / "bare")


@pytest.mark.slow
def test_a_copy_on_a_read_only_disk_launches_when_its_folder_is_put_on_the_path(
    make_bare_python: Callable[[], Path], tmp_path: Path
):
    copy = tmp_path / "input"
    shutil.copytree(ROOT / "nb_accelerate", copy / "nb_accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    # Root may write to what nobody may write to, except on such a disk.
    mount = f"mount --bind {copy} {copy} && mount -o remount,ro,bind {copy} && ! touch {copy}/x 2>/dev/null"
    enter = ("unshare", "--mount", "sh", "-ec", f'{mount} && exec "$@"', "sh")
    if shutil.which("unshare") is None or subprocess.run([*enter, "true"], check=False, timeout=20).returncode:
        pytest.skip("needs root, and Linux with mount namespaces")
    before = sorted(copy.rglob("*"))
    first = f"import sys; sys.path.insert(0, {str(copy)!r})\n"
    files = _launch(make_bare_python(), tmp_path, first=first, wrapper=enter)
    assert set(files) == {str(copy / "nb_accelerate" / "__init__.py")}
    assert sorted(copy.rglob("*")) == before
