"""Choose how the panel is drawn. Front ends do not say whether they show widgets; the request of a cell has hints."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

FrontEnd = Literal["widget", "terminal", "text", "off"]

# Metadata of a request from a front end that is a terminal and draws what a `Relay` sends.
FROM_TERMINAL = {"nb_accelerate.terminal": True}


def choose_front_end(progress: str) -> FrontEnd:
    """Return where the panel of the code that runs now is drawn."""
    if progress == "off":
        return "off"
    kernel = _kernel()
    metadata = {} if kernel is None else kernel.get_parent().get("metadata", {})
    if progress != "widget" and FROM_TERMINAL.items() <= metadata.items():
        return "terminal"
    if progress == "text" or kernel is None:
        return "text"
    is_shown = progress == "widget" or shows_widgets(kernel.get_parent(), os.environ)
    # A package is looked for last, because that takes a tenth of the time of a short cell.
    if is_shown and (sys.modules.get("ipywidgets") or importlib.util.find_spec("ipywidgets") is not None):
        return "widget"
    return "text"


def shows_widgets(request: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether the front end that sent a request shows widgets."""
    # JupyterLab, Notebook 7 and VS Code name the cell in the request; nbclient, nbconvert and papermill, which run
    # notebooks without a person, do not. Colab and Kaggle name themselves in the environment, voila too.
    if "COLAB_RELEASE_TAG" in environ or any(name.startswith("VOILA_") for name in environ):
        return True
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:
        return environ["KAGGLE_KERNEL_RUN_TYPE"] == "Interactive"
    return "cellId" in request.get("metadata", {})


def is_in_kernel() -> bool:
    return _kernel() is not None


def _kernel() -> Any:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)
