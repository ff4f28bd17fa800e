"""``nb_accelerate.attach()``: show the panel of a launch or a cell for the ranks in one more cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.topology.rank_lists import label
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.display.drawing.lines import Lines, bundle
from nb_accelerate.notebook.display.frontend import choose_front_end
from nb_accelerate.notebook.display.widgets import asides
from nb_accelerate.notebook.ranks.output.sinks import sink_here
from nb_accelerate.notebook.ranks.request_panel import make_drawing, recent

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.panel import Drawing, Panel, PanelSource


def attach(name: str | None = None) -> None:
    """Show the panel of a run here too: one that is on moves, one that is over shows its end and its log.

    For a page that was reloaded, say, or far below the cell that has started it. It runs once the kernel is free: at
    once if the run was launched with ``block=False``. The last eight runs of this notebook are known.

    Args:
        name: of the run: the function of a launch, or a cell as in ``"cell 7"``. None is the newest run that is on, or
            the last one if none is.

    Raises:
        ConfigError: there is no such run.

    Examples:
        >>> launch = notebook_launcher(train, num_processes=2, block=False)
        >>> attach("train")
    """
    panel = _find(name)
    sink = sink_here()
    front_end = choose_front_end("auto")

    def draw(source: PanelSource) -> Drawing:
        drawing = make_drawing(panel.ranks, sink, source, front_end)
        if isinstance(drawing, Lines):  # its first line may come late
            sink.write(sink.own_stream, f"attached to {panel.name}, which runs on {label(panel.ranks)}\n")
        return drawing

    if panel.attach(draw):
        return
    if panel.ended is not None:
        content = bundle(panel.ended)
        printed = {rank: text for rank, text in panel.logs.items() if text}
        content["data"]["text/html"] += asides.logs(printed)
        content["data"]["text/plain"] += "".join(f"\nlog of rank {rank}:\n{text}" for rank, text in printed.items())
        sink.display("display_data", content)
    sink.close()


def _find(name: str | None) -> Panel:
    found = [panel for panel in recent if name in (None, panel.name)]
    if not found:
        names = list(dict.fromkeys(panel.name for panel in recent))
        known = f"{suggest(name or '', names)} There are: {', '.join(names)}" if names else " There was none yet"
        raise ConfigError(
            f"attach({'' if name is None else repr(name)}): there is no such run in this notebook.{known}"
        )
    return next((panel for panel in reversed(found) if panel.ended is None), found[-1])
