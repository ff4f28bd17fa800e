"""The notebooks for Colab and Kaggle, on the CPU device, with the variables of those images."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import nbformat
import pytest

from nb_accelerate.cli import notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VALUES = {"first": "first", "second": "second"}
CHIPS = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import gloo_double; gloo_double.install(2)
import atexit; atexit.register(gloo_double.remove)
"""

pytestmark = [pytest.mark.limit(200), pytest.mark.may_leave("files")]


def check(name: str, folder: Path, cells: str, **variables: str) -> None:
    """Run a copy of a notebook in another folder, after some cells, and check what it has returned."""
    copy = Path(shutil.copy(NOTEBOOKS / name, folder))
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    run = notebook.execute(
        copy,
        progress=io.StringIO(),
        env=env | variables,
        values=VALUES,
        change=lambda one: one.cells.insert(0, nbformat.v4.new_code_cell(cells)),
    )
    assert run.failure is None, run.failure.render(color=False)
    for one in (run.values["first"], run.values["second"]):
        assert one["tied"]
        assert one["blocks"] == 100
        assert one["device"] == "xla:0"
    assert run.values["second"]["loss"] < run.values["first"]["loss"] < 3.5


def test_colabs_notebook_learns_and_goes_on(tmp_path: Path) -> None:
    check("10_tpu_colab.ipynb", tmp_path, "", COLAB_RELEASE_TAG="release-colab_20260801-060049_RC00")


def test_kaggles_notebook_learns_on_all_chips_and_goes_on(tmp_path: Path) -> None:
    check(
        "11_tpu_kaggle.ipynb",
        tmp_path,
        CHIPS,
        KAGGLE_KERNEL_RUN_TYPE="Batch",
        TPU_PROCESS_ADDRESSES="local",
        CLOUD_TPU_TASK_ID="0",
    )
