from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from fixtures.notebook_runs import values_of

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))


def _load_execute() -> ModuleType:
    """The program that runs the notebooks; it belongs to no package."""
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "site" / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = _load_execute()


def dirt(one: nbformat.NotebookNode) -> list[str]:
    """What a notebook holds that should not be committed."""
    found = []
    if (one.nbformat, one.nbformat_minor) < (4, 5):
        found.append(f"format {one.nbformat}.{one.nbformat_minor}, which has no cell ids")
    for number, cell in enumerate(one.cells):
        name = f"cell {number}"
        tags = cell.metadata.get("tags", [])
        if not cell.get("id"):
            found.append(f"{name} has no id")
        if set(cell.metadata) - {"tags"}:
            found.append(f"{name} has metadata: {', '.join(cell.metadata)}")
        for output in cell.get("outputs", []):
            if output.output_type == "error" and "raises-exception" not in tags:
                found.append(f"{name} has failed")
            if any("widget" in kind for kind in output.get("data", {})):
                found.append(f"{name} has a widget, which is gone when the kernel is")
    if "widgets" in one.metadata:
        found.append("widget state")
    return found


def staleness(one: nbformat.NotebookNode) -> str:
    """Why the outputs of a notebook are not those of its cells; "" if they are."""
    if one.metadata.get("nb_accelerate", {}).get("executed") != execute.digest(one):
        return "its cells have changed since it was run: make notebooks"
    tagged = [cell for cell in one.cells if "raises-exception" in cell.metadata.get("tags", [])]
    if any(all(output.output_type != "error" for output in cell.outputs) for cell in tagged):
        return "a cell that should have failed did not"
    return ""


def test_there_are_notebooks():
    assert PATHS[0].name == "00_quickstart.ipynb"
    assert {path.name for path in PATHS} >= execute.ELSEWHERE


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_committed_notebook_is_clean(path: Path):
    one = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(one)
    assert dirt(one) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_committed_notebook_has_the_outputs_of_its_cells(path: Path):
    one = nbformat.read(path, as_version=4)
    if path.name in execute.ELSEWHERE:
        assert not any(cell.get("outputs") for cell in one.cells)
    else:
        assert staleness(one) == ""


def test_what_is_not_clean_is_reported():
    outputs = [
        nbformat.v4.new_output("error", ename="E", evalue="", traceback=[]),
        nbformat.v4.new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}}),
    ]
    cell = nbformat.v4.new_code_cell("1", outputs=outputs, execution_count=1, metadata={"trusted": True})
    one = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    assert dirt(one) == [
        "cell 0 has metadata: trusted",
        "cell 0 has failed",
        "cell 0 has a widget, which is gone when the kernel is",
        "widget state",
    ]
    one.nbformat_minor = 4
    del cell["id"]
    assert dirt(one)[:2] == ["format 4.4, which has no cell ids", "cell 0 has no id"]


def test_a_cell_that_was_changed_after_the_run_is_noticed():
    cell = nbformat.v4.new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    one = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_markdown_cell("words")])
    assert "make notebooks" in staleness(one)
    one.metadata["nb_accelerate"] = {"executed": execute.digest(one)}
    assert "should have failed" in staleness(one)
    cell.outputs = [nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])]
    assert staleness(one) == ""
    one.cells[1].source = "other words"
    assert staleness(one) == ""
    cell.source = "2 / 0"
    assert "make notebooks" in staleness(one)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
@pytest.mark.parametrize("name", ["05_debug_and_heal", "06_data", "09_many_machines"])
def test_a_notebook_runs_again_with_the_errors_and_texts_that_are_committed(name: str, tmp_path: Path):
    committed = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    again = nbformat.from_dict(committed)
    execute.execute(again, tmp_path, {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"})
    assert [_said(cell) for cell in again.cells] == [_said(cell) for cell in committed.cells]


def _said(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell prints and raises, without figures that differ from run to run."""
    texts = []
    for output in cell.get("outputs", []):
        if output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}")
        elif output.output_type == "stream" and output.name == "stdout":
            texts += re.sub(r"\d+ MB|\b\d{3,}\b", "", output.text).split()
    return texts


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_a_run_that_is_killed_goes_on_and_its_losses_are_those_of_the_undisturbed_one():
    values = values_of(
        NOTEBOOKS / "02_checkpoints.ipynb",
        steps="(len(undisturbed['losses']), same)",
        starts="(undisturbed['start'], resumed['start'], restarted['start'])",
        restarted="restarted['losses'] == undisturbed['losses']",
    )
    assert values["steps"] == [342, 342]
    assert values["starts"] == [0, 200, 200]
    assert values["restarted"] is True
