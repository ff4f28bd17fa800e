"""Run the notebooks as JupyterLab would, and keep their outputs in them: `make notebooks`.

A page of a repository then shows what comes out, panels too. The notebook's metadata say what was run: a test compares
that with the cells, so that a change without a new run is noticed.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import nbformat
import torch
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1]
ELSEWHERE = {"10_tpu_colab.ipynb", "11_tpu_kaggle.ipynb"}
"""Notebooks for machines with a TPU: they have no outputs."""

_LONGEST = 300
"""Seconds that a cell may take."""


def paths(numbers: list[str]) -> list[Path]:
    """Return the notebooks to run: those whose names begin with one of the numbers, or all."""
    found = sorted(path for path in NOTEBOOKS.glob("*.ipynb") if path.name not in ELSEWHERE)
    return [path for path in found if not numbers or path.name.startswith(tuple(numbers))]


def digest(notebook: Any) -> str:
    """Return what the code of a notebook is known by."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


class _Client(NotebookClient):
    """nbclient, as the front end of a person and with the kernel of this very Python."""

    def create_kernel_manager(self) -> AsyncKernelManager:
        self.km = AsyncKernelManager(
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), kernel_name="python3", transport_encryption="auto"
        )
        self.km.session.metadata = {"cellId": ""}  # front ends that show panels name the cell in each request
        return self.km


def execute(notebook: Any, folder: Path, env: dict[str, str] | None = None) -> None:
    """Run all cells of a notebook, in place.

    Args:
        notebook: as nbformat has read it.
        folder: the working directory of its kernel.
        env: the environment of its kernel; that of this process by default.

    Raises:
        CellExecutionError: a cell fails that is not tagged ``raises-exception``.
    """
    metadata = dict(notebook.metadata)
    client = _Client(
        notebook,
        timeout=_LONGEST,
        coalesce_streams=True,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(**({} if env is None else {"env": env}))
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("data") != {}]  # buttons, now gone
    notebook.metadata["nb_accelerate"] = {"executed": digest(notebook), "torch": torch.__version__}


def main() -> int:
    """Run the notebooks whose numbers the command line names, by default all."""
    for path in paths(sys.argv[1:]):
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        execute(notebook, path.parent)
        nbformat.write(notebook, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
