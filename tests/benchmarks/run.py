"""Measure, and print ratios of things that were timed in one run: `make bench`.

A benchmark is a module ``bench_SUBJECT.py`` next to this file, with ``measure()`` that gives lines of the table.
A number of seconds says as much about the machine as about the code. The ratio of two that were taken in turns, on
one machine at one time, can be compared with that of last month.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def main(subjects: list[str]) -> None:
    """Run the benchmarks of these subjects, or all."""
    for subject in subjects or sorted(file.stem.removeprefix("bench_") for file in FOLDER.glob("bench_*.py")):
        print(subject.replace("_", " "))
        for line in importlib.import_module(f"bench_{subject}").measure():
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
