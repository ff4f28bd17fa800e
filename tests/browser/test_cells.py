"""`%%distributed` cells as one sees them in JupyterLab and Notebook 7."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.server import Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(180)]

CELLS = [
    # Values that are equal are shown once, also if a rank is off the CPU for more than a moment.
    "%load_ext nb_accelerate\nimport dataclasses\nfrom nb_accelerate.notebook.pool import Pool\n"
    "Pool.timeouts = dataclasses.replace(Pool.timeouts, fold=30.0)",
    "%%distributed -n 2\nimport os\nprint('here is rank', rank)\nworld_size * 100",
    "%%distributed\nimport matplotlib.pyplot as plt\nplt.figure(figsize=(3, 1))\nplt.plot([rank, 1, 2]);",
    "%%distributed\nkept = rank + 7\nif rank == 1:\n    {}['missing']\naccelerator.wait_for_everyone()",
    "%%distributed\nkept",
    "%distributed stop",
]


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_cells_on_ranks_show_values_prints_figures_and_errors_and_go_on(
    open_notebook: OpenNotebook, where: Where
) -> None:
    notebook = open_notebook(CELLS, where)
    for number in range(len(CELLS)):
        notebook.run(number)
        notebook.wait_until_done()

    values = notebook.output(1)
    assert "here is rank 0" in values
    assert "here is rank 1" in values
    assert values.count("200") == 1, "equal values are shown once"
    assert notebook.count(2, "img") == 2
    assert "KeyError" in notebook.output(3)
    assert "rank 1" in notebook.output(3)
    assert "Cell In[4], line 4" in notebook.output(3)
    after = notebook.output(4)
    assert "7" in after
    assert "8" in after
    notebook.screenshot(f"cells-{where}")
    saved = notebook.save()
    assert [output["output_type"] for output in saved.cells[3].outputs][-1] == "error"
