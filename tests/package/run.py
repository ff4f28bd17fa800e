"""Build the wheel and the source distribution, and try what the README says in an environment that has only the wheel.

What `make package` runs. Both files are left in ``dist/``. The environment lies outside of the checkout, so that
nothing is imported from there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PINS = ROOT / "tests" / "requirements-dev.txt"

SESSION = """\
%load_ext nb_accelerate
---
%%distributed -n 2 --out found
import nb_accelerate
(rank, nb_accelerate.__file__)
---
import sys
assert [rank for rank, _ in found] == [0, 1]
assert all(file.startswith(sys.prefix) for _, file in found), found
"""
"""Cells that are run before those of the README: ranks import the package from the wheel."""


def main() -> None:
    """Build, check, install and try."""
    with tempfile.TemporaryDirectory(prefix="nb-package-") as temporary:
        folder = Path(temporary)
        wheel = build(folder / "tools")
        python = install(folder / "env", wheel)
        work = folder / "work"
        work.mkdir()
        try_commands(python, work)
        try_readme(python, work, (ROOT / "README.md").read_text(encoding="utf-8"))
    print(f"{wheel.relative_to(ROOT)} does what the README says")


def build(tools: Path) -> Path:
    """Put both distributions into an empty ``dist/``, the wheel built from the other, and check what they declare."""
    for file in DIST.glob("nb_accelerate-*"):
        file.unlink()
    python = make_environment(tools)
    install_quietly(tools, "build", "twine")
    run(python, "-m", "build", "--outdir", DIST, ROOT, quiet=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    run(python, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel


def install(environment: Path, wheel: Path) -> Path:
    """Install the wheel and what it asks for; return the Python that has it."""
    python = make_environment(environment)
    install_quietly(environment, "--constraint", PINS, f"{wheel}[notebooks]")
    run(python, "-m", "pip", "check")
    return python


def install_quietly(environment: Path, *arguments: str | Path) -> None:
    """Install into an environment."""
    run(sys.executable, ROOT / "tests" / "install.py", environment, "--quiet", *arguments)


def make_environment(folder: Path) -> Path:
    """Make an environment with pip; return its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def try_commands(python: Path, work: Path) -> None:
    """Run the commands with which a user begins."""
    command = python.with_name("nb-accelerate")
    for arguments in ("--version", "--help", "env", "test", "status", "launch --help"):
        run(command, *shlex.split(arguments), cwd=work, quiet=True)
    run(python, "-c", "import nb_accelerate, sys; assert nb_accelerate.__file__.startswith(sys.prefix)", cwd=work)


def try_readme(python: Path, work: Path, readme: str) -> None:
    """Run the blocks of the README as the cells of one notebook. None may raise an error."""
    of_readme = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert of_readme, "no block of Python was found in the README"
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (*SESSION.split("---\n"), *of_readme)]
    nbformat.write(notebook, work / "readme.ipynb")
    run(python.with_name("nb-accelerate"), "launch", "readme.ipynb", cwd=work)


def run(*command: str | Path, cwd: Path = ROOT, quiet: bool = False) -> None:
    """Run a program without what points to the checkout; end with what it printed if it fails."""
    env = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    words = shlex.join(map(str, command)).replace(f"{Path(command[0]).parents[1]}/", "")
    began = time.monotonic()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=quiet, text=True, timeout=900, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout or ''}{done.stderr or ''}{words} ended with {done.returncode}")
    print(f"{time.monotonic() - began:5.1f} s  {words}", flush=True)


if __name__ == "__main__":
    main()
