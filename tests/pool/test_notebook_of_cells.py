"""The notebook that shows cells on ranks, as a reader runs it from the top."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from nb_accelerate.cli import notebook

PATH = Path(__file__).parents[2] / "notebooks" / "01_distributed_cells.ipynb"


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_the_notebook_runs_from_top_to_bottom_and_learns_the_digits():
    run = notebook.execute(
        PATH,
        progress=io.StringIO(),
        # With this variable ipykernel believes to run in its own tests, and does not capture what C code prints.
        env={key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        values={"accuracy": "accuracy", "losses": "losses"},
    )
    assert run.failure is None, run.failure.render(color=False)
    first, second = run.values["accuracy"]
    assert first == second > 0.8
    of_rank_0, of_rank_1 = run.values["losses"]
    assert of_rank_0 != of_rank_1
