"""Packages that are older than those that this one works with, as far as importlib.metadata tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nb_accelerate.base.config.versions import LOWEST, is_too_old
from nb_accelerate.cli import main

OLD = [
    ("ipython", "7.33.0", "7.34"),
    ("ipykernel", "6.16.2", "6.17.1"),
    ("torch", "2.7.1+cu126", "2.8"),
]

LOAD_EXTENSION = """
from IPython.core.interactiveshell import InteractiveShell
import nb_accelerate
nb_accelerate.load_ipython_extension(InteractiveShell())
"""
LAUNCH = """
import nb_accelerate
nb_accelerate.notebook_launcher(print, num_processes=2)
"""
IMPORT_OF_WHAT_IS_NOT_THERE = """
import sys
sys.modules["IPython"] = sys.modules["cloudpickle"] = None
import nb_accelerate
nb_accelerate.notebook_launcher
"""


@pytest.fixture
def folder_of(tmp_path: Path):
    """Makes a folder for the path in which another version of a package is installed, as its metadata say."""

    def make(package: str, version: str) -> Path:
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return tmp_path

    return make


def last_line(code: str, folder: Path) -> str:
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), root]), "IPYTHONDIR": str(folder / "ipython")}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode != 0, run.stdout
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize("code", [LOAD_EXTENSION, LAUNCH], ids=["load_ext", "launch"])
@pytest.mark.parametrize(("package", "version", "lowest"), OLD)
def test_what_is_too_old_is_refused_with_what_to_install(folder_of, code: str, package: str, version: str, lowest: str):
    assert last_line(code, folder_of(package, version)).endswith(
        f"MissingDependencyError: nb_accelerate needs {package} {lowest} or newer, but {version} is installed. "
        f"Run: pip install '{package}>={lowest}', and restart"
    )


def test_an_import_that_fails_beside_an_old_package_is_told_as_that(folder_of):
    assert "needs ipython 7.34" in last_line(IMPORT_OF_WHAT_IS_NOT_THERE, folder_of("ipython", "7.33.0"))


def test_an_import_that_fails_otherwise_stays_what_it_is(folder_of):
    assert "ModuleNotFoundError" in last_line(IMPORT_OF_WHAT_IS_NOT_THERE, folder_of("ipython", "7.34.0"))


def test_env_marks_what_is_too_old(folder_of, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(folder_of("ipykernel", "6.16.2"))
    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert re.match(r"6\.16\.2, too old .*'ipykernel>=6\.17\.1'", rows["ipykernel"])
    assert not any("too old" in value for name, value in rows.items() if name != "ipykernel")
    assert rows.keys() >= LOWEST.keys()


@pytest.mark.parametrize("version", ["2.8.0", "2.8", "2.10.0+cu128", "2.8.0a0+git123", "2.14.0.dev20261101"])
def test_a_version_is_compared_by_its_numbers(version: str):
    assert not is_too_old("torch", version)
    assert is_too_old("torch", "2.7.1+cu126")
    assert not is_too_old("a-package-without-bound", "0")
