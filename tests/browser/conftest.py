"""One Jupyter server and one Chromium for the tests of this folder, a page and a kernel for each test."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from fixtures.leaks import lasting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fixtures.python_template import PythonTemplate

    from browser.chromium import Chromium
    from browser.notebook import Notebook
    from browser.server import JupyterServer, Theme, Where

# A path that was used before would be given its old kernel.
_numbers = itertools.count(1)


def notebook_of(cells: Sequence[str]) -> str:
    code: dict[str, object] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {
        "cells": [code | {"id": f"cell-{number}", "source": cell.strip()} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content)


class OpenNotebook(Protocol):
    def __call__(self, cells: Sequence[str] | Path, where: Where = "lab", theme: Theme = "light", /) -> Notebook: ...


@pytest.fixture(scope="package")
def server(python_template: PythonTemplate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    from browser.server import JupyterServer

    one = JupyterServer(tmp_path_factory.mktemp("jupyter"), python_template)
    yield one
    one.close()


@pytest.fixture(scope="package")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    from browser.chromium import Chromium

    one = Chromium(tmp_path_factory.mktemp("chromium"))
    with lasting(one.processes):
        yield one
    one.close()


@pytest.fixture
def open_notebook(server: JupyterServer, chromium: Chromium) -> Iterator[OpenNotebook]:
    """Open a notebook of these code cells, or the notebook at this path."""
    from browser.notebook import Notebook

    opened: list[Notebook] = []

    def open_(cells: Sequence[str] | Path, where: Where = "lab", theme: Theme = "light", /) -> Notebook:
        name = f"notebook-{next(_numbers)}.ipynb"
        text = cells.read_text(encoding="utf-8") if isinstance(cells, Path) else notebook_of(cells)
        (server.notebooks / name).write_text(text, encoding="utf-8")
        opened.append(Notebook(server, chromium, name, where, theme))
        return opened[-1]

    yield open_
    for notebook in opened:
        notebook.close()
    left = server.end_kernels()
    assert left == [], "a kernel that was shut down left these behind"
