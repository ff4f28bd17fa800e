"""Where the panel of a cell is drawn, from what a request and the environment say."""

from __future__ import annotations

import sys
import types

import pytest

from nb_accelerate.notebook.display.frontend import FROM_TERMINAL, choose_front_end, shows_widgets

CELL = {"metadata": {"cellId": "1a2b"}, "content": {"allow_stdin": True}}
NO_CELL = {"metadata": {}, "content": {"allow_stdin": False}}


@pytest.mark.parametrize(
    ("request_", "environ", "shows"),
    [
        pytest.param(CELL, {}, True, id="JupyterLab"),
        pytest.param(CELL, {"JPY_SESSION_NAME": "a.ipynb"}, True, id="Notebook 7"),
        pytest.param(CELL, {"VSCODE_PID": "1"}, True, id="VS Code"),
        pytest.param(NO_CELL, {}, False, id="nbclient"),
        pytest.param({"metadata": {}}, {"PAPERMILL_OUTPUT_PATH": "b.ipynb"}, False, id="papermill"),
        pytest.param({}, {}, False, id="no request yet"),
        pytest.param(NO_CELL, {"VOILA_KERNEL_ID": "x"}, True, id="voila"),
        pytest.param(NO_CELL, {"COLAB_RELEASE_TAG": "release"}, True, id="Colab"),
        pytest.param(NO_CELL, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, True, id="Kaggle, somebody looks"),
        pytest.param(CELL, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, False, id="Kaggle, saving"),
    ],
)
def test_who_shows_widgets(request_: dict[str, object], environ: dict[str, str], shows: bool):
    assert shows_widgets(request_, environ) is shows


@pytest.fixture
def in_kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Is this process a kernel? It is one whose request this is."""
    request: dict[str, object] = {"metadata": {}}
    kernel = types.SimpleNamespace(get_parent=lambda: request)
    ipython = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=kernel))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    for name in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return request


def test_in_a_terminal_it_is_text_whatever_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert [choose_front_end(one) for one in ("auto", "widget", "text", "off")] == ["text", "text", "text", "off"]


def test_in_a_kernel_it_is_what_the_user_wants_else_what_can_be_seen(in_kernel: dict[str, object]):
    assert [choose_front_end(one) for one in ("auto", "widget", "text", "off")] == ["text", "widget", "text", "off"]
    in_kernel["metadata"] = {"cellId": "1"}
    assert [choose_front_end(one) for one in ("auto", "text", "off")] == ["widget", "text", "off"]


def test_a_terminal_that_asks_for_the_panel_gets_it_whatever_the_environment_says(
    in_kernel: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    in_kernel["metadata"] = dict(FROM_TERMINAL)
    assert [choose_front_end(one) for one in ("auto", "text", "off")] == ["terminal", "terminal", "off"]
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release")
    assert [choose_front_end(one) for one in ("auto", "widget")] == ["terminal", "widget"]


def test_without_ipywidgets_it_is_text(in_kernel: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    in_kernel["metadata"] = {"cellId": "1"}
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert [choose_front_end(one) for one in ("auto", "widget", "off")] == ["text", "text", "off"]
