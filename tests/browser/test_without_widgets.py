"""The panel where nothing draws its widgets, or something that knows no kernel: in exported pages, and in front ends.

Colab cannot be run here. Like a JupyterLab without the extension for widgets, it may show buttons of which the kernel
never hears, or none; the table is plain output in both.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from browser.conftest import notebook_of
from browser.html_manager import ExportedPage, scripts
from browser.notebook import SCREENSHOTS, Notebook
from browser.server import JupyterServer
from browser.test_panel import SETUP, launch, start

if TYPE_CHECKING:
    from pathlib import Path

    from browser.chromium import Chromium
    from browser.conftest import OpenNotebook

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

WIDGETS = "application/vnd.jupyter.widget-state+json"
VIEW = "application/vnd.jupyter.widget-view+json"
SAVE_STATE = "() => window.jupyterapp.commands.execute('@jupyter-widgets/jupyterlab-manager:saveWidgetState')"


def views_of(notebook: Any) -> list[str]:
    """Return the ids of the models that outputs of a notebook show."""
    return [
        output.data[VIEW]["model_id"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if VIEW in output.get("data", {})
    ]


def test_exported_pages_show_the_table_with_the_state_of_widgets_without_it_and_without_a_manager(
    open_notebook: OpenNotebook, chromium: Chromium, tmp_path: Path
) -> None:
    names = scripts(tmp_path)
    notebook = open_notebook([SETUP, launch(2, steps=3000)])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_until(
        "() => [...document.querySelectorAll('.jp-OutputArea button')].some(button => button.innerText === 'More')"
    )  # so there are all widgets
    notebook.evaluate(SAVE_STATE)
    notebook.wait_until(
        "() => window.jupyterapp.commands.isToggled('@jupyter-widgets/jupyterlab-manager:saveWidgetState')"
    )
    saved = notebook.save()
    notebook.evaluate(SAVE_STATE)
    notebook.interrupt()
    notebook.wait_until_done()
    (model,) = views_of(saved)
    assert model in saved.metadata.widgets[WIDGETS]["state"]
    lost = copy.deepcopy(saved)
    lost.metadata.widgets[WIDGETS]["state"] = {}

    for case, one, there in (
        ("with-state", saved, names),
        ("without-state", lost, names),
        ("without-manager", saved, {}),
    ):
        page = ExportedPage(chromium, one, there)
        page.wait_for(".nba tbody tr")
        if case == "with-state":
            page.wait_for("button.jupyter-widgets-disconnected")
        elif case == "without-state":
            page.wait_until_quiet()
        page.screenshot(SCREENSHOTS / f"exported-{case}.png")
        assert page.count(".nba tbody tr") == 2, case
        assert "it/s" in page.text, case
        assert "not found" not in page.text.lower(), case
        assert page.count("button") == 0, "no kernel hears of them"
        assert "No news since" not in page.text, case
        page.finish_animations()
        assert "No news since" in page.text, case
        assert page.problems == [], case
        page.close()

    saved = notebook.save()
    assert views_of(saved) == []
    page = ExportedPage(chromium, saved, names)
    page.wait_for(".nba tbody tr")
    page.finish_animations()
    assert "■" in page.text
    assert "No news since" not in page.text
    page.close()


def test_in_a_front_end_without_widgets_the_table_moves_and_its_end_stays(tmp_path: Path, chromium: Chromium) -> None:
    settings = tmp_path / "config" / "labconfig"
    settings.mkdir(parents=True)
    off = {"disabledExtensions": {"@jupyter-widgets/jupyterlab-manager": True}}
    (settings / "page_config.json").write_text(json.dumps(off), encoding="utf-8")
    server = JupyterServer(tmp_path)
    try:
        (server.notebooks / "plain.ipynb").write_text(notebook_of([SETUP, launch(2, steps=100)]), encoding="utf-8")
        notebook = Notebook(server, chromium, "plain.ipynb", "lab", "light")
        notebook.run(0)
        notebook.wait_until_done()
        start(notebook, 1)
        step = "() => document.querySelector('.nba td.nba-step').innerText"
        seen = notebook.evaluate(step)
        notebook.wait_until(f"seen => ({step})() !== seen", seen)
        notebook.screenshot("front-end-without-widgets", cell=1)
        assert notebook.count(1, "button") == 0
        assert "not found" not in notebook.output(1).lower()
        notebook.wait_until_done(90)
        assert "not found" not in notebook.wait_for_output(1, "✓").lower()
        assert notebook.count(1, "tbody tr") == 2
        notebook.close()
        assert server.end_kernels() == []
    finally:
        server.close()
