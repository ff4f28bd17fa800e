"""The notebooks for Colab and Kaggle, on the CPU device, with variables of those images."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate.cli import notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VALUES = {"first": "first", "second": "second", "all": "globals().get('values')"}
pytestmark = [pytest.mark.limit(200), pytest.mark.may_leave("files")]


def check(name: str, folder: Path, *, greatest_loss: float, **variables: str) -> dict[str, Any]:
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
    assert run.values["second"]["loss"] < run.values["first"]["loss"] < greatest_loss
    return run.values


def test_colabs_notebook_learns_and_goes_on(tmp_path: Path) -> None:
    check("10_tpu_colab.ipynb", tmp_path, greatest_loss=3.5, COLAB_RELEASE_TAG="release-colab_20260801-060049_RC00")


@pytest.mark.slow
@pytest.mark.limit(400)
def test_kaggles_notebook_trains_on_all_chips_and_goes_on(tmp_path: Path) -> None:
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "chips.py").write_text(
        f"import atexit, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import gloo_double; gloo_double.install(2); atexit.register(gloo_double.remove)\n"
    )
    values = check(
        "11_tpu_kaggle.ipynb",
        tmp_path,
        greatest_loss=3.6,
        IPYTHONDIR=str(startup.parents[1]),
        KAGGLE_KERNEL_RUN_TYPE="Interactive",
        TPU_PROCESS_ADDRESSES="local",
        CLOUD_TPU_TASK_ID="0",
    )
    assert values["all"] == [values["first"]] * 2
