"""Measure, and print ratios of things that were timed in one run: `make bench`.

A benchmark is a module ``bench_SUBJECT.py`` next to this file, with ``measure()`` that gives lines of the table.
A number of seconds says as much about the machine as about the code. The ratio of two that were taken in turns, on
one machine at one time, can be compared with that of last month.
"""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path

import page

SUBJECTS = sorted(file.stem.removeprefix("bench_") for file in Path(__file__).parent.glob("bench_*.py"))


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure, and print ratios of things that were timed in one run.")
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; by default all")
    parser.add_argument("--page", action="store_true", help="write the page of the documentation")
    parser.add_argument(
        "--printed", type=Path, nargs="+", metavar="FILE", help="measure nothing: what was printed is in these files"
    )
    options = parser.parse_args()
    unknown = sorted({*options.subjects} - {*SUBJECTS})
    if unknown:
        parser.error(f"no benchmark of {', '.join(unknown)}; there are: {', '.join(SUBJECTS)}")
    if options.printed:
        sections = page.sections_of("\n".join(file.read_text(encoding="utf-8") for file in options.printed))
        date = max(file.stat().st_mtime for file in options.printed)
    else:
        sections, date = measure(options.subjects or SUBJECTS), time.time()
    if options.page:
        page.PAGE.write_text(page.render(sections, date), encoding="utf-8")


def measure(subjects: list[str]) -> dict[str, list[str]]:
    """Run benchmarks, print what they say, and return it."""
    sections: dict[str, list[str]] = {}
    for subject in subjects:
        name = subject.replace("_", " ")
        print(name)
        lines = sections.setdefault(name, [])
        for line in importlib.import_module(f"bench_{subject}").measure():
            lines.append(line)
            print(f"  {line}", flush=True)
    return sections


if __name__ == "__main__":
    main()
