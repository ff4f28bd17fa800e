"""The notebooks for Colab and Kaggle, on the CPU device, with variables of those images.

They begin in a Python that has the packages of this one without ours, and install a wheel; pip may ask no index.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fixtures.notebook_runs import values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixtures.distributions import Distributions

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
VALUES = {
    "first": "first",
    "second": "second",
    "all": "globals().get('values')",
    "package": "__import__('nb_accelerate').__file__",
}
PLAY_CHIPS_WHEN_INSTALLED = """
import atexit, importlib.util, sys
sys.path.insert(0, {folder!r})
import gloo_double

def play(result):
    if importlib.util.find_spec("nb_accelerate") is not None:
        get_ipython().events.unregister("post_run_cell", play)
        gloo_double.install(2)
        atexit.register(gloo_double.remove)

get_ipython().events.register("post_run_cell", play)
"""
pytestmark = [pytest.mark.limit(200), pytest.mark.may_leave("files")]


@pytest.fixture
def bare_python(make_bare_python: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of the kernels that a test starts. Our package is not in it."""
    python = make_bare_python()
    monkeypatch.setattr(sys, "executable", str(python))
    return python


def check(name: str, folder: Path, python: Path, *, greatest_loss: float, **variables: str) -> dict[str, Any]:
    """Run a copy of a notebook in another folder, and check what it has returned."""
    copy = Path(shutil.copy(NOTEBOOKS / name, folder))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    values = values_of(copy, env | {"PIP_NO_INDEX": "1"} | variables, **VALUES)
    assert Path(values["package"]).is_relative_to(python.parents[1])
    for result in (values["first"], values["second"]):
        assert result["tied"]
        assert result["blocks"] == 100
        assert result["device"] == "xla:0"
    assert values["second"]["loss"] < values["first"]["loss"] < greatest_loss
    return values


def test_colabs_notebook_learns_and_goes_on(distributions: Distributions, bare_python: Path, tmp_path: Path) -> None:
    content = tmp_path / "content"
    content.mkdir()
    shutil.copy(distributions.wheel, content)
    release = {"COLAB_RELEASE_TAG": "release-colab_20260801-060049_RC00"}
    check("10_tpu_colab.ipynb", content, bare_python, greatest_loss=3.5, **release)


@pytest.mark.slow
@pytest.mark.limit(400)
def test_kaggles_notebook_trains_on_all_chips_and_goes_on(
    distributions: Distributions, bare_python: Path, tmp_path: Path
) -> None:
    working, dataset = tmp_path / "working", tmp_path / "input" / "wheels"
    working.mkdir()
    dataset.mkdir(parents=True)
    shutil.copy(distributions.wheel, dataset)
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "chips.py").write_text(PLAY_CHIPS_WHEN_INSTALLED.format(folder=str(Path(__file__).parent)))
    values = check(
        "11_tpu_kaggle.ipynb",
        working,
        bare_python,
        greatest_loss=3.6,
        IPYTHONDIR=str(startup.parents[1]),
        KAGGLE_KERNEL_RUN_TYPE="Interactive",
        TPU_PROCESS_ADDRESSES="local",
        CLOUD_TPU_TASK_ID="0",
    )
    assert values["all"] == [values["first"]] * 2
