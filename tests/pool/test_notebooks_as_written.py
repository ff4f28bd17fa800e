"""Notebooks as people write them, on two ranks: by `%distributed auto`, and with `--convert`, after one process.

Their cells define what later cells use, so what this package does with names, identity, seeds and rows comes together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from fixtures.kernels import Cell, Kernel
from fixtures.plain_cells import SHAPES

pytestmark = pytest.mark.slow

OWN_MODEL = "each of the 2 processes trains a model of its own"
WHOLE = "each of the 2 ranks computes all of"

COMPUTED_BY_EACH = {"char-RNN without a loader", "GCN", "GCN of an adjacency matrix"}
"""Their rows cannot be told from one another."""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.set_timeouts("nb_accelerate.pool.Pool", fold=30.0)
    shared_kernel.run("import torch\ntorch.set_num_threads(1)\n%load_ext nb_accelerate").ok()
    shared_kernel.run("%distributed start -n 2").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def numbers(cell: Cell) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell.stdout)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_notebook_prints_the_numbers_of_one_process_and_says_who_shared_the_work(notebook: Kernel, shape: str):
    *defining, last = SHAPES[shape]
    for code in defining:
        notebook.run(code).ok()
    alone = numbers(notebook.run(last).ok())
    assert len(alone) > 3

    for code in defining:
        notebook.run(code).ok()
    converted = notebook.run(f"%%distributed --convert\n{last}").ok()
    assert numbers(converted) == pytest.approx(alone, rel=2e-3, abs=1e-5), converted.stdout
    assert (WHOLE in converted.stderr) == (shape in COMPUTED_BY_EACH), converted.stderr
    assert OWN_MODEL not in converted.stderr

    notebook.run("%distributed auto on").ok()
    try:
        by_cell = [notebook.run(code).ok() for code in SHAPES[shape]]
    finally:
        notebook.run("%distributed auto off").ok()
    assert numbers(by_cell[-1]) == pytest.approx(alone, rel=2e-3, abs=1e-5)
    assert sum(OWN_MODEL in cell.stderr for cell in by_cell) == 1, [cell.stderr for cell in by_cell]
    notebook.run("%distributed reset").ok()
