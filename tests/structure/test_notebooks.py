from __future__ import annotations

import io
import os
from pathlib import Path

import nbformat
import pytest

from nb_accelerate.cli import notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def dirt(one: nbformat.NotebookNode) -> list[str]:
    """What a notebook holds that should not be committed."""
    found = []
    if (one.nbformat, one.nbformat_minor) < (4, 5):
        found.append(f"format {one.nbformat}.{one.nbformat_minor}, which has no cell ids")
    for number, cell in enumerate(one.cells):
        name = f"cell {number}"
        if not cell.get("id"):
            found.append(f"{name} has no id")
        if cell.metadata:
            found.append(f"{name} has metadata: {', '.join(cell.metadata)}")
        if cell.cell_type == "code" and cell.outputs:
            found.append(f"{name} has outputs")
        if cell.cell_type == "code" and cell.execution_count is not None:
            found.append(f"{name} has an execution count")
    if "widgets" in one.metadata:
        found.append("widget state")
    return found


def test_there_are_notebooks():
    assert PATHS[0].name == "00_quickstart.ipynb"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_committed_notebook_is_clean(path: Path):
    one = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(one)
    assert dirt(one) == []


def test_what_is_not_clean_is_reported():
    cell = nbformat.v4.new_code_cell(
        "1", outputs=[nbformat.v4.new_output("stream", text="1")], execution_count=1, metadata={"trusted": True}
    )
    one = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    assert dirt(one) == [
        "cell 0 has metadata: trusted",
        "cell 0 has outputs",
        "cell 0 has an execution count",
        "widget state",
    ]
    one.nbformat_minor = 4
    del cell["id"]
    assert dirt(one)[:2] == ["format 4.4, which has no cell ids", "cell 0 has no id"]


@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_the_quickstart_learns_the_digits_on_two_ranks_and_counts_each_held_out_image_once():
    run = notebook.execute(
        NOTEBOOKS / "00_quickstart.ipynb",
        progress=io.StringIO(),
        # With this variable ipykernel believes to run in its own tests, and does not capture what C code prints.
        env={key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        values={
            "ranks": "len(results)",
            "accuracies": "[history[-1]['accuracy'] for history in results]",
            "evaluated": "[epoch['evaluated'] for history in results for epoch in history]",
        },
    )
    assert run.failure is None, run.failure.render(color=False)
    assert run.values["ranks"] == 2
    assert set(run.values["evaluated"]) == {360}
    first, second = run.values["accuracies"]
    assert first == second >= 0.95


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_a_run_that_is_killed_goes_on_and_its_losses_are_those_of_the_undisturbed_one():
    run = notebook.execute(
        NOTEBOOKS / "02_checkpoints.ipynb",
        progress=io.StringIO(),
        env={key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        values={
            "steps": "(len(undisturbed['losses']), same)",
            "starts": "(undisturbed['start'], resumed['start'], restarted['start'])",
            "restarted": "restarted['losses'] == undisturbed['losses']",
        },
    )
    assert run.failure is None, run.failure.render(color=False)
    assert run.values["steps"] == [342, 342]
    assert run.values["starts"] == [0, 200, 200]
    assert run.values["restarted"] is True
