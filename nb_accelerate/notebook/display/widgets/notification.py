"""A notification of the browser when a run has ended, if somebody has pressed the button for it.

Both the button and what shows the notification are HTML in widgets, and live in the page: a browser asks for permission
only when something in the page is pressed, and not when the kernel says so. A page that is loaded anew forgets that
the button was pressed.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.widgets.page_title import EMPTY_IMAGE

if TYPE_CHECKING:
    from nb_accelerate.notebook.display.view import View

LEAST_SECONDS = 30.0
"""A shorter run is waited for."""

_ASK = (
    "const wanted = window.nbAccelerateNotify ??= new Set(), key = this.dataset.key;"
    " const say = said => { this.textContent = said; };"
    " if (wanted.delete(key)) { say('Notify'); }"
    " else if (!window.Notification) { say('No notifications here'); }"
    " else { Notification.requestPermission().then(answer => {"
    " if (answer === 'granted') { wanted.add(key); say('Will notify'); } else { say('Not allowed'); } }); }"
)

_NOTIFY = (
    "if (window.nbAccelerateNotify?.delete(this.dataset.key) && document.hidden) {"
    " new Notification(this.dataset.title, {body: this.dataset.body}); }"
)


def notify_button(key: str) -> str:
    """Return the button, which asks the browser for permission.

    Args:
        key: of the panel, as for `notify_script`.
    """
    return (
        f'<button class="jupyter-widgets jupyter-button widget-button nba-copy" data-key="{key}" onclick="{_ASK}"'
        ' title="show a notification when it ends, if this tab is hidden then">Notify</button>'
    )


def notify_script(key: str, view: View) -> str:
    """Return HTML that shows the notification in pages where the button was pressed and that nobody looks at.

    Args:
        key: as for `notify_button`.
    """
    title = escape(f"{view.facts.name}: {view.state}")
    body = escape(", ".join((view.elapsed, *view.summary)))
    return (
        f'<img alt="" src="{EMPTY_IMAGE}" data-key="{key}" data-title="{title}" data-body="{body}" onload="{_NOTIFY}">'
    )
