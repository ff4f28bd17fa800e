"""Measure, and print ratios of things that were timed in one run: `make bench`.

A benchmark is a module ``bench_SUBJECT.py`` next to this file, with ``measure()`` that gives lines of the table.
A number of seconds says as much about the machine as about the code. The ratio of two that were taken in turns, on
one machine at one time, can be compared with that of last month.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

import page

SUBJECTS = sorted(file.stem.removeprefix("bench_") for file in Path(__file__).parent.glob("bench_*.py"))

ELSEWHERE = {"deepspeed", "ray", "xla"}
"""Subjects that are measured in environments of their own; they say how when they are asked for."""


def main() -> int:
    """Run the benchmarks that were asked for; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Measure, and print ratios of things that were timed in one run.")
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; by default all for this environment"
    )
    parser.add_argument("--page", action="store_true", help="write the page of the documentation")
    parser.add_argument(
        "--printed", type=Path, nargs="+", metavar="FILE", help="measure nothing: what was printed is in these files"
    )
    options = parser.parse_args()
    unknown = sorted({*options.subjects} - {*SUBJECTS})
    if unknown:
        parser.error(f"no benchmark of {', '.join(unknown)}; there are: {', '.join(SUBJECTS)}")
    failed: list[str] = []
    if options.printed:
        sections = page.sections_of("\n".join(file.read_text(encoding="utf-8") for file in options.printed))
        date = max(file.stat().st_mtime for file in options.printed)
    else:
        subjects = options.subjects or [subject for subject in SUBJECTS if subject not in ELSEWHERE]
        sections, date = measure(subjects, failed), time.time()
    print("\nbeside the last release:", *page.beside_release(sections), sep="\n")
    if options.page:
        page.PAGE.write_text(page.render(sections, date), encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def measure(subjects: list[str], failed: list[str]) -> dict[str, list[str]]:
    """Run benchmarks, print what they say, and return it; add to `failed` those that raise, and go on with the next."""
    sections: dict[str, list[str]] = {}
    for subject in subjects:
        name = subject.replace("_", " ")
        print(name)
        lines: list[str] = []
        try:
            for line in importlib.import_module(f"bench_{subject}").measure():
                lines.append(line)
                print(f"  {line}", flush=True)
        except Exception:  # of one subject; the others are measured all the same
            traceback.print_exc()
            failed.append(name)
        else:
            sections[name] = lines
    return sections


if __name__ == "__main__":
    sys.exit(main())
