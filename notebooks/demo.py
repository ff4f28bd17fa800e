"""What `make demo` runs: the quickstart notebook, from top to bottom, written as a notebook and as a page."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat

from nb_accelerate.cli import notebook

NOTEBOOK = Path(__file__).parent / "00_quickstart.ipynb"
OUTPUT = Path("build", "demo")

CHECK = """\
# is it what it should be?
last = results[0][-1]
print(f"test accuracy     {last['accuracy']:.4f}")
print(f"images evaluated  {last['evaluated']}")
print(f"ranks             {len(results)}")
assert len(results) == 2
assert {epoch["evaluated"] for history in results for epoch in history} == {360}, "360 images were held out"
assert last["accuracy"] >= 0.95, "this model reaches 0.95 on these images"
assert results[1][-1]["accuracy"] == last["accuracy"], "ranks have one model"
"""
"""A last cell, in the copy that is run."""


def main() -> int:
    """Run the notebook, write what came of it, and say whether it is what it should be."""
    began = time.monotonic()
    check = nbformat.v4.new_code_cell(CHECK)  # type: ignore[no-untyped-call]
    run = notebook.execute(NOTEBOOK, progress=sys.stdout, change=lambda book: book.cells.append(check))
    executed, page = notebook.write_notebook(run, OUTPUT), notebook.write_page(run, OUTPUT)
    print(f"seconds           {time.monotonic() - began:.1f}")
    print(f"notebook          {executed}")
    print(f"page              {page.resolve().as_uri()}")
    if run.failure is not None:
        print(f"\n{run.failure.render(color=sys.stdout.isatty())}")
    return 130 if run.interrupted else int(run.failure is not None)


if __name__ == "__main__":
    sys.exit(main())
