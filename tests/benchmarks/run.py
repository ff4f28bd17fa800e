"""Measure, and print ratios of things that were timed in one run: `make bench`.

A benchmark is a module ``bench_SUBJECT.py`` next to this file, with ``measure()`` that gives lines of the table.
A number of seconds says as much about the machine as about the code. The ratio of two that were taken in turns, on
one machine at one time, can be compared with that of last month.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

SUBJECTS = sorted(file.stem.removeprefix("bench_") for file in Path(__file__).parent.glob("bench_*.py"))


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure, and print ratios of things that were timed in one run.")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; by default all")
    subjects = parser.parse_args().subjects or SUBJECTS
    unknown = sorted({*subjects} - {*SUBJECTS})
    if unknown:
        parser.error(f"no benchmark of {', '.join(unknown)}; there are: {', '.join(SUBJECTS)}")
    for subject in subjects:
        print(subject.replace("_", " "))
        for line in importlib.import_module(f"bench_{subject}").measure():
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
