"""The notebook that shows cells on ranks, as a reader runs it from the top."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.notebook_runs import values_of

PATH = Path(__file__).parents[2] / "notebooks" / "01_distributed_cells.ipynb"


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_the_notebook_runs_from_top_to_bottom_and_learns_the_digits():
    found = values_of(PATH, accuracy="accuracy", losses="losses")
    first, second = found["accuracy"]
    assert first == second > 0.8
    of_rank_0, of_rank_1 = found["losses"]
    assert of_rank_0 != of_rank_1
