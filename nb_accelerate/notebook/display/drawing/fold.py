"""A part of a panel that opens by a click, and stays open when the panel is drawn again."""

from __future__ import annotations


def fold(summary: str, content: str, *, key: str, kind: str, hint: str = "") -> str:
    """Return what unfolds, as HTML. A script of one line, where scripts run, opens it again in the next drawing.

    Args:
        summary: what is there before, and is clicked on; HTML.
        content: what appears below it; HTML.
        key: of this part of this panel; "" if it is drawn once.
        kind: its class.
        hint: what appears over the summary, and is read in its place.
    """
    says = f' title="{hint}" aria-label="{hint}"' if hint else ""
    keeps = script = ""
    if key:
        opened = f"(window.nbaOpen=window.nbaOpen||{{}})['{key}']"
        keeps = f' data-nba="{key}" ontoggle="{opened}=this.open"'
        script = (
            f"<script>document.querySelectorAll('details[data-nba=\"{key}\"]').forEach("
            f"function(d){{d.open=!!{opened}}})</script>"
        )
    return f'<details class="{kind}"{keeps}><summary{says}>{summary}</summary>{content}</details>{script}'
