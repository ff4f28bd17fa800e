"""``make tests-of FILE=nb_accelerate/...``: run the tests that go through a file, in any process that they start.

The first time all fast tests run with a trace, and what is found is kept in build/calls: remove that folder after
larger changes. ``ARGS='--collect-only -q'`` lists the tests, ``ARGS=...`` are arguments of pytest in general.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = ROOT / "build" / "calls"


def record(command: list[str]) -> None:
    """Run tests to their end, and keep which files of the package each calls."""
    unfinished = CALLS.with_name("calls.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    hook = Path(sysconfig.get_path("purelib")) / "calls_of_tests.pth"
    script = str(ROOT / "tests" / "fixtures" / "calls.py")
    hook.write_text(f"import os, runpy; 'CALLS_OF_TESTS' in os.environ and runpy.run_path({script!r})['trace']()\n")
    try:
        subprocess.run(command, cwd=ROOT, env=os.environ | {"CALLS_OF_TESTS": str(unfinished)}, check=False)
    finally:
        hook.unlink()
    unfinished.rename(CALLS)


def tests_of(file: str) -> list[str]:
    """Return the names of the tests that go through a file, which is named as below the package."""
    names = dict(line.rstrip("\n").split("\t", 1) for line in (CALLS / "names").open(encoding="utf-8"))
    calls = {line.rstrip("\n") for line in (CALLS / "calls").open(encoding="utf-8")}
    return sorted({name for number, name in names.items() if f"{number}\t{file}" in calls})


def main() -> None:
    file, *arguments = sys.argv[1:]
    path = (ROOT / file).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT / "nb_accelerate"):
        sys.exit(f"{file} is no file of the package. Write: make tests-of FILE=nb_accelerate/notebook/worker/cell.py")
    if not CALLS.exists():
        print("the fast tests run once with a trace, which takes about ten minutes", flush=True)
        record(["make", "test", "ARGS="])
    found = tests_of(str(path.relative_to(ROOT / "nb_accelerate")))
    print(f"{len(found)} tests go through {file}", flush=True)
    if found:
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", *found, *arguments], cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
