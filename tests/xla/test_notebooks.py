"""The notebook for Colab, on the CPU device, with a variable of that image."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest

from nb_accelerate.cli import notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VALUES = {"first": "first", "second": "second"}
pytestmark = [pytest.mark.limit(200), pytest.mark.may_leave("files")]


def check(name: str, folder: Path, **variables: str) -> None:
    """Run a copy of a notebook in another folder, and check what it has returned."""
    copy = Path(shutil.copy(NOTEBOOKS / name, folder))
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    run = notebook.execute(
        copy,
        progress=io.StringIO(),
        env=env | variables,
        values=VALUES,
    )
    assert run.failure is None, run.failure.render(color=False)
    for one in (run.values["first"], run.values["second"]):
        assert one["tied"]
        assert one["blocks"] == 100
        assert one["device"] == "xla:0"
    assert run.values["second"]["loss"] < run.values["first"]["loss"] < 3.5


def test_colabs_notebook_learns_and_goes_on(tmp_path: Path) -> None:
    check("10_tpu_colab.ipynb", tmp_path, COLAB_RELEASE_TAG="release-colab_20260801-060049_RC00")
