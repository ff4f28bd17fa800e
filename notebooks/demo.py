"""What `make demo` runs: the quickstart notebook, from top to bottom, written as a notebook and as a page."""

from __future__ import annotations

import sys
from pathlib import Path

from nb_accelerate.cli import notebook

NOTEBOOK = Path(__file__).parent / "00_quickstart.ipynb"
OUTPUT = Path("build", "demo")
HELD_OUT = 360
WANTED_ACCURACY = 0.95

VALUES = {
    "ranks": "len(results)",
    "accuracy": "results[0][-1]['accuracy']",
    "evaluated": "results[0][-1]['evaluated']",
}


def main() -> int:
    """Run the notebook, write what came of it, and say whether it is what it should be."""
    run = notebook.execute(NOTEBOOK, progress=sys.stdout, values=VALUES)
    executed, page = notebook.write_notebook(run, OUTPUT), notebook.write_page(run, OUTPUT)
    if run.interrupted:
        print(f"as far as it came: {executed}")
        return 130
    if run.failure is not None:
        print(f"\n{run.failure.render(color=sys.stdout.isatty())}\n\nas far as it came: {executed}")
        return 1

    ranks, accuracy, evaluated = run.values["ranks"], run.values["accuracy"], run.values["evaluated"]
    print()
    print(f"test accuracy     {accuracy:.4f}")
    print(f"images evaluated  {evaluated}")
    print(f"ranks             {ranks}")
    print(f"seconds           {run.seconds:.1f}")
    print(f"notebook          {executed}")
    print(f"page              {page.resolve().as_uri()}")
    if evaluated != HELD_OUT:
        print(f"\nwrong: {evaluated} images were evaluated, but {HELD_OUT} were held out")
        return 1
    if accuracy < WANTED_ACCURACY:
        print(f"\nwrong: the accuracy is {accuracy:.4f}, but this model reaches {WANTED_ACCURACY} on these images")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
