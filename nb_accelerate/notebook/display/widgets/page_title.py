"""How far a run is, in the title of the page: ``43 % · Untitled - JupyterLab``.

A widget that nobody sees draws it: an image without content, whose ``onload`` changes the title. The widget is closed
when the run ends, so nothing of it is in the saved notebook. The title is what it was as soon as the widget says so,
and if it says nothing for some time: the kernel has ended then, or the output was cleared. Where a page shows outputs
in frames of their own, as Colab and VS Code do, the title of a frame is changed, which is not to be seen. Of several
runs in a page, the title tells the one that is behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.view import View

REPEAT_EVERY = 3.0
"""Seconds after which the title is sent again if it is the same: front ends set their own at times."""

_FORGET_AFTER = 10_000
"""Milliseconds without a word of the kernel until a run is no longer in the title."""

# An exported page may have the widget's state too, but no kernel.
_SCRIPT = (
    "if (!this.closest('.jupyter-widgets-disconnected')) {"
    " const runs = window.nbAccelerateRuns ??= new Map(), key = this.dataset.key, percent = this.dataset.percent;"
    " const show = () => { const shown = [...runs.values()].map(run => run.percent);"
    " document.title = (shown.length ? Math.min(...shown) + ' % · ' : '')"
    " + document.title.replace(/^\\d+ % · /, ''); };"
    " const forget = () => { clearTimeout(runs.get(key)?.timer); runs.delete(key); };"
    f" forget(); if (percent) {{ const timer = setTimeout(() => {{ forget(); show(); }}, {_FORGET_AFTER});"
    " runs.set(key, {percent: Number(percent), timer}); }"
    " show(); }"
)

EMPTY_IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


def percent_of(view: View) -> int | None:
    """Return how far the rank is that is behind all others, in whole percent; None if that is not known."""
    shares = [row.share for row in view.rows if row.share is not None]
    return int(100 * min(shares)) if shares else None


def title_script(key: str, percent: int | None, number: int) -> str:
    """Return HTML that changes the title of the page that draws it.

    Args:
        key: of the panel; none of another panel.
        percent: how far the run is; None for the title as it was.
        number: of the drawing. A widget sends its value if it is another one.
    """
    shown = "" if percent is None else percent
    data = f'data-key="{key}" data-percent="{shown}" data-number="{number}"'
    return f'<img alt="" src="{EMPTY_IMAGE}" {data} onload="{_SCRIPT}">'
