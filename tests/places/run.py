"""Run a whole session, and quick tests, with the versions of each place where notebooks live. See ``make test-places``.

A place is a list of versions beside this file, a Python, and a PyTorch. PyTorch is installed without the libraries of
CUDA that it asks for: empty ones take their place, see ``tests/xla/cuda_stubs.py``.

    python tests/places/run.py [NAME ...] [-- ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Place(NamedTuple):
    """A Python and a PyTorch, and the tests that run with them beside those of this folder."""

    python: str
    torch: str
    tests: tuple[str, ...]


WIDGETS = ("tests/display/test_clicks.py", "tests/display/test_new_pages.py", "tests/display/test_in_kernels.py")
QUICK = (
    "tests/structure/test_import_time.py",
    "tests/structure/test_versions.py",
    "tests/pool/test_alarm.py",
    "tests/pool/test_cells.py",
    "tests/pool/test_debugger.py",
    "tests/pool/test_names.py",
    "tests/launch/test_displays.py",
    "tests/launch/test_notebook_launcher.py",
    "tests/training/rehearsal/test_devices.py",
    "tests/training/rehearsal/test_rehearsals.py",
    *WIDGETS,
)

PLACES = {
    "colab": Place("3.13", "2.11.0", QUICK),
    "kaggle": Place("3.12", "2.10.0", WIDGETS),
    "lowest": Place("3.10", "2.8.0", QUICK),
    "newest": Place("3.13", "2.15.0", WIDGETS),
}

BESIDE = ("hypothesis", "matplotlib", "pandas", "setuptools", "sympy", "networkx", "jinja2", "filelock", "fsspec")
"""What tests and PyTorch import, where a list does not have it."""


def main(arguments: list[str]) -> int:
    """Run the places that are named, or all; return 1 if a test failed, and 0 if all passed."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:cut] or [*PLACES], arguments[cut + 1 :]
    unknown = [name for name in names if name not in PLACES]
    if unknown:
        sys.exit(f"{unknown[0]!r} is no place. Write some of: {', '.join(PLACES)}")
    outcomes = {name: run(name, PLACES[name], options) for name in names}
    print("\n".join(f"{name:<8}{outcome}" for name, outcome in outcomes.items()))
    return int(any(outcome == "failed" for outcome in outcomes.values()))


def run(name: str, place: Place, options: list[str]) -> str:
    """Run the tests of a place; return what became of it."""
    python = find_python(place.python)
    if python is None:
        missing = f"Python {place.python} is not here"
        if os.environ.get("CI"):  # where it has to be
            sys.exit(f"{name}: {missing}")
        return f"not run: {missing}"
    began = time.monotonic()
    environment = ROOT / ".venv-places" / name
    ours = HERE / f"{name}.txt"
    ready = environment / "ready"
    if not ready.exists() or ready.stat().st_mtime < max(ours.stat().st_mtime, Path(__file__).stat().st_mtime):
        print(f"=== {name}: installing {ours.name} and PyTorch {place.torch} for Python {place.python}", flush=True)
        install(environment, python, ours, place.torch)
        ready.touch()
    print(f"=== {name}: running the tests", flush=True)
    pytest: list[str | Path] = [environment / "bin" / "python", "-m", "pytest", "--disable-warnings", "-m"]
    commands = ([*pytest, "not browser", "tests/places"], [*pytest, "not browser and not slow", *place.tests])
    codes = [subprocess.run([*command, *options], cwd=ROOT, check=False).returncode for command in commands]
    print(f"=== {name}: {time.monotonic() - began:.0f} s", flush=True)
    return "failed" if any(codes) else "passed"


def find_python(version: str) -> str | None:
    """Return the path of a Python of this version, on the search path or one of pyenv's; None if there is none."""
    found = [shutil.which(f"python{version}") or ""]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True))
    for python in filter(None, found):
        # One of pyenv's on the search path may say that it is not that of this folder.
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def install(environment: Path, python: str, versions: Path, torch: str) -> None:
    """Make an environment anew."""
    pinned = re.findall(r"^pytest==.*", (ROOT / "tests/requirements-dev.txt").read_text(), re.MULTILINE)
    listed = [line for line in versions.read_text().splitlines() if line and not line.startswith(("#", "torch=="))]
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    add: list[str | Path] = [sys.executable, ROOT / "tests/install.py", environment, "--quiet"]
    # What this machine pins for all is not what the place has.
    unpinned = os.environ | {"PIP_CONSTRAINT": os.devnull}
    subprocess.run([*add, *listed, *pinned, *BESIDE], env=unpinned, check=True)
    subprocess.run([*add, "--no-deps", f"torch=={torch}", "--editable", ROOT], env=unpinned, check=True)
    own = environment / "bin" / "python"
    subprocess.run([own, ROOT / "tests/xla/cuda_stubs.py"], check=True)
    subprocess.run(
        [own, "-c", "import torch._dynamo, ipykernel.kernelapp; assert torch.ones(2).sum() == 2"], check=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
