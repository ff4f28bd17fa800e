"""Progress bars of a rank in the panel: what tqdm would draw goes to the page when somebody shows it.

Every bar that draws in a terminal derives from `tqdm.std.tqdm`: `trange`, `tqdm.auto` outside of a kernel, those of
datasets and transformers. Their counting and throttling stay as they are; only where they draw is changed. Bars of
``tqdm.notebook`` are widgets of a kernel, which a rank is not: there they become such bars too.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
import types
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.base.progress_page import here

if TYPE_CHECKING:
    from collections.abc import Callable

_INDEX = "_nb_accelerate_index"
_BAR = re.compile(r"\{bar[^}]*\}")
_TEXT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
# What tqdm writes on the right of its bar by default.
_TEXT_WITHOUT_TOTAL = "{n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]"

_DRAWING = ("__init__", "__iter__", "update", "display", "close", "clear", "reset")


def bars_in_panel() -> None:
    """Make tqdm draw on the page whenever `ProgressPage.wants_rows`. Without tqdm there is nothing to do."""
    if "tqdm" not in sys.modules and importlib.util.find_spec("tqdm") is None:
        return
    from tqdm.std import tqdm, trange

    if hasattr(tqdm, _INDEX):
        return  # done in the process this one was forked from
    setattr(tqdm, _INDEX, None)
    for name, wrap in (("display", _display), ("clear", _clear), ("close", _close)):
        setattr(tqdm, name, wrap(getattr(tqdm, name)))
    widgets: Any = imported("tqdm.notebook")
    if widgets is None:
        widgets = sys.modules["tqdm.notebook"] = types.ModuleType("tqdm.notebook")
        widgets.tqdm = widgets.tqdm_notebook = tqdm
        widgets.trange = widgets.tnrange = trange
        sys.modules["tqdm"].notebook = widgets  # type: ignore[attr-defined]  # as importing it does
    else:  # the notebook had imported it, and this process is a fork
        for name in _DRAWING:
            setattr(widgets.tqdm_notebook, name, getattr(tqdm, name))


def _display(draw: Callable[..., Any]) -> Callable[..., Any]:
    def display(self: Any, msg: str | None = None, pos: int | None = None) -> Any:
        if not _is_row(self):
            return draw(self, msg, pos)
        if msg is None:
            _write(self, ended=False)
        return True

    return display


def _clear(wipe: Callable[..., None]) -> Callable[..., None]:
    def clear(self: Any, nolock: bool = False) -> None:
        if not _is_row(self):
            wipe(self, nolock)

    return clear


def _close(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    def close(self: Any) -> None:
        if getattr(self, "disable", True) or not _is_row(self):
            finish(self)
            return
        index = _index(self)
        if index is None:
            pass  # there was no room for it, or it is left over from a cell before
        elif self.leave or (self.leave is None and self.pos == 0):
            _write(self, ended=True)
        else:
            here().drop_bar(index)
        self.disable = True
        self._decr_instances(self)

    return close


def _is_row(bar: Any) -> bool:
    """Return whether a bar would be seen in the cell; others write to a file of the user's."""
    stream = getattr(bar, "fp", None)
    return here().wants_rows and getattr(stream, "_wrapped", stream) in (sys.stdout, sys.stderr)


def _index(bar: Any) -> int | None:
    """Return the index of a bar on the page, or None: one that a cell left open loses it when the next cell begins."""
    request, index = getattr(bar, _INDEX) or (None, None)
    return index if request == here().request else None


def _write(bar: Any, *, ended: bool) -> None:
    page = here()
    index = _index(bar)
    label = (bar.desc or "").rstrip(": ")
    if index is None:
        index = page.new_bar(label, bar.total)
        if index is None:
            return
        setattr(bar, _INDEX, (page.request, index))
    page.bar(
        index,
        label=label,
        text=_text(bar, label, ended=ended),
        count=bar.n,
        total=bar.total,
        began=time.monotonic() - time.time() + getattr(bar, "start_t", time.time()),  # set after the first drawing
        level=abs(bar.pos),
        ended=ended,
    )


def _text(bar: Any, label: str, *, ended: bool) -> str:
    """Return what tqdm writes on the right of its bar; all but the label if a ``bar_format`` of the user's has none."""
    known = bar.format_dict
    wanted = known["bar_format"] or (_TEXT if bar.total else _TEXT_WITHOUT_TOTAL)
    known |= {"bar_format": _BAR.sub("<bar/>", wanted), "ncols": None}
    if ended:
        known["rate"] = None  # the mean, as tqdm writes at the end
    text = bar.format_meter(**known).rpartition("<bar/>")[2]
    return str(text).removeprefix(label).strip(":| ")
