"""The commands of the Makefile, with a program that writes down how it is called in place of Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

NOT_TRIED = {"help", "setup", "clean", "test-places"}
"""Commands that run no program of an environment that was set up before."""

WRITES_DOWN = """#!/bin/sh
echo "called $0" >>calls
case "$PYTHONPATH" in "" | "$PWD") ;; *) echo "PYTHONPATH is $PYTHONPATH" >&2; exit 3 ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name, and with environments that are set up."""
    folder = tmp_path / "a folder"
    (folder / "tests" / "xla").mkdir(parents=True)
    for file in (
        "Makefile",
        "pyproject.toml",
        "tests/xla/cuda_stubs.py",
        *map(str, ROOT.glob("tests/requirements-*.txt")),
    ):
        shutil.copy(ROOT / file, folder / Path(ROOT / file).relative_to(ROOT))
    for name in (
        ".venv",
        ".venv-deepspeed",
        ".venv-trainers",
        ".venv-ray",
        ".venv-xla",
        ".venv-xla-2.8.0",
        ".venv-docs",
    ):
        programs = folder / name / "bin"
        programs.mkdir(parents=True)
        for program in ("python", "mkdocs"):
            (programs / program).write_text(WRITES_DOWN)
            (programs / program).chmod(0o755)
    (folder / ".venv" / "ready").touch()  # the others must not be older
    (folder / ".venv" / "rivals").touch()
    for environment in folder.glob(".venv-*"):
        (environment / "ready").touch()
    return folder


def run(folder: Path, *words: str) -> list[str]:
    """Run make, and return which programs were called."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    made = subprocess.run(
        ["make", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("target", sorted({*re.findall(r"^([\w-]+):.*?## ", MAKEFILE, re.MULTILINE)} - NOT_TRIED))
def test_a_command_works_in_a_folder_with_a_space(checkout: Path, target: str):
    assert run(checkout, target)


def test_each_version_of_torch_xla_has_an_environment_of_its_own(checkout: Path):
    assert run(checkout, "test-xla") == ["called .venv-xla/bin/python"]
    assert run(checkout, "test-xla", "XLA_VERSION=2.8.0")[1:] == ["called .venv-xla-2.8.0/bin/python"]
