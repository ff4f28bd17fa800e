"""Parts of a panel that open by a click, and stay open when the panel is drawn again."""

from __future__ import annotations


def fold(summary: str, content: str, *, key: str, kind: str, hint: str = "") -> str:
    """Return what unfolds, as HTML.

    Args:
        summary: what is there before, and is clicked on; HTML.
        content: what appears below it; HTML.
        key: of this part of this panel; "" if it is drawn once.
        kind: its class.
        hint: what appears over the summary, and is read in its place.
    """
    says = f' title="{hint}" aria-label="{hint}"' if hint else ""
    keeps = f' data-nba="{key}" ontoggle="(window.nbaOpen=window.nbaOpen||{{}})[this.dataset.nba]=this.open"'
    return f'<details class="{kind}"{keeps if key else ""}><summary{says}>{summary}</summary>{content}</details>'


def open_again(key: str) -> str:
    """Return a script, as HTML, that opens the parts of a panel that were open when it was drawn before.

    Args:
        key: with which the keys of the panel's parts begin.
    """
    return (
        f"<script>document.querySelectorAll('details[data-nba^=\"{key}\"]').forEach("
        "function(d){d.open=!!(window.nbaOpen||{})[d.dataset.nba]})</script>"
    )
