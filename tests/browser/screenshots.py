"""Pictures of the panel in JupyterLab for somebody who looks at them: `make screenshots` writes build/screenshots.

Each state is pictured in windows of several widths, light and dark: running, done, stuck, failed, loaded anew while it
runs, and left by a kernel that has ended.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import Chromium
from browser.conftest import notebook_of
from browser.notebook import Notebook
from browser.server import JupyterServer, Theme
from browser.test_panel import SETUP, launch

WIDTHS = (1280, 700, 420)
THEMES: tuple[Theme, ...] = ("light", "dark")
_UNTIL_GONE = 17.0
"""Seconds after which a frame that is not drawn again says so."""


def picture(notebook: Notebook, cell: int, state: str, theme: Theme) -> None:
    """Picture the output of a cell in windows of all widths."""
    for width in WIDTHS:
        notebook.resize(width)
        notebook.scroll_to(cell)
        print(notebook.screenshot(f"{state}-{width}-{theme}", cell=cell), flush=True)
    notebook.resize(WIDTHS[0])  # a narrow panel has fewer columns


def picture_all(server: JupyterServer, chromium: Chromium, theme: Theme) -> None:
    """Picture all states in one theme."""
    name = f"states-{theme}.ipynb"
    cells = [
        SETUP,
        launch(2, steps=120, epochs=2, pause=0.1),
        launch(8, steps=60, stuck=1),
        launch(2, steps=60, wrong=1),
        launch(2, steps=3000),
    ]
    (server.notebooks / name).write_text(notebook_of(cells), encoding="utf-8")
    notebook = Notebook(server, chromium, name, "lab", theme)
    notebook.hide_sidebar()
    notebook.run(0)
    notebook.wait_until_done(90)
    notebook.run(1)
    notebook.wait_for_output(1, "it/s", timeout=90)
    notebook.wait_until("() => document.querySelector('.nba header path') !== null", timeout=60)
    picture(notebook, 1, "running", theme)
    notebook.wait_until_done(120)
    picture(notebook, 1, "done", theme)
    notebook.run(2)
    notebook.wait_for_output(2, "has not moved", timeout=120)
    picture(notebook, 2, "stuck", theme)
    notebook.wait_until_done(120)
    notebook.run(3)
    notebook.wait_until_done(120)
    picture(notebook, 3, "failed", theme)
    notebook.run(4)
    notebook.wait_for_output(4, "it/s", timeout=90)
    notebook.save()
    notebook.reload()
    notebook.wait_for_output(4, "train", timeout=60)
    picture(notebook, 4, "reloaded", theme)
    server.end_kernels()
    time.sleep(_UNTIL_GONE)  # it is the picture of what appears by itself
    picture(notebook, 4, "kernel-gone", theme)
    notebook.close()


def main() -> None:
    """Picture all states in the themes that the command line names, by default in all."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jupyter", "chromium"):
            Path(folder, name).mkdir()
        server = JupyterServer(Path(folder, "jupyter"))
        try:
            chromium = Chromium(Path(folder, "chromium"))
            try:
                for theme in THEMES:
                    if theme in (sys.argv[1:] or THEMES):
                        picture_all(server, chromium, theme)
            finally:
                chromium.close()
        finally:
            server.end_kernels()
            server.close()


if __name__ == "__main__":
    main()
