"""How far a run is stands in the title of the page, while it runs and no longer; its end is a notification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browser.test_panel import SETUP, launch, start, wait_for_percent
from nb_accelerate.notebook.display.widgets.page_title import title_script

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.server import Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

HAS_PERCENT = r"() => /^\d+ % · (?!\d+ %)/.test(document.title)"
HAS_NONE = "() => !document.title.includes('%')"


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_the_title_says_how_far_a_run_is_until_it_ends_also_after_a_reload(
    open_notebook: OpenNotebook, where: Where
) -> None:
    notebook = open_notebook([SETUP, launch(2, steps=3000)], where)
    before = notebook.evaluate("() => document.title")
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_until(HAS_PERCENT)
    seen = notebook.evaluate("() => document.title")
    assert seen.endswith(before.removeprefix("• ")), "a star or dot of the front end is its own"
    notebook.wait_until("seen => document.title !== seen", seen)
    saved = notebook.save()
    assert "document.title" not in str(saved)
    notebook.reload()
    notebook.wait_until(HAS_PERCENT, timeout=60)
    # The first value may be there before the page hears the kernel, and the kernel the page.
    seen = notebook.evaluate("() => document.title")
    notebook.wait_until("seen => document.title !== seen", seen)
    wait_for_percent(notebook, 0, ranks=2)
    notebook.press_button(1, "Interrupt")
    notebook.wait_for_output(1, "■")
    notebook.wait_until(HAS_NONE, timeout=5)


def test_the_title_is_what_it_was_when_the_output_is_cleared_and_when_the_kernel_dies(
    open_notebook: OpenNotebook,
) -> None:
    notebook = open_notebook([SETUP, launch(2, steps=3000)])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_until(HAS_PERCENT)
    notebook.clear(1)
    notebook.wait_until(HAS_NONE, timeout=20)
    notebook.interrupt()
    notebook.wait_until_done()
    notebook.run(1)
    notebook.wait_until(HAS_PERCENT, timeout=60)
    notebook.kernel.kill()
    notebook.wait_until(HAS_NONE, timeout=20)


def test_of_several_runs_the_title_tells_the_one_that_is_behind(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP])
    draw = "script => document.body.insertAdjacentHTML('beforeend', script)"
    begins = "start => start ? document.title.startsWith(start) : !document.title.includes('%')"
    drawings = (("a", 43, "43 %"), ("b", 12, "12 %"), ("b", 50, "43 %"), ("a", None, "50 %"), ("b", None, ""))
    for key, percent, start_of_title in drawings:
        notebook.evaluate(draw, title_script(key, percent, 0))
        notebook.wait_until(begins, start_of_title)


# What the browser shows cannot be seen from a page, and no page of a browser without a screen is hidden: so it is noted
# what is asked of the browser's own Notification, and the page is told that it is hidden.
WATCH = """() => {
    const Real = Notification;
    window.shown = [];
    window.Notification = class extends Real {
        constructor(title, options) { super(title, options); window.shown.push(`${title}. ${options.body}`); }
    };
    Object.defineProperty(document, 'hidden', {get: () => true});
}"""
AT_ONCE = "from nb_accelerate.notebook.display import notification; notification.LEAST_SECONDS = 0.0"


def test_who_has_pressed_the_button_is_notified_of_the_end(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP + AT_ONCE, launch(2, steps=3000)])
    notebook.allow_notifications()
    notebook.evaluate(WATCH)
    notebook.run(0)
    notebook.wait_until_done()
    for presses, expected in ((0, 0), (1, 1), (2, 1)):
        start(notebook, 1)
        notebook.wait_until(HAS_PERCENT)
        for said in ("Will notify", "Notify")[:presses]:
            notebook.click("button[data-key]")
            notebook.wait_until("said => document.querySelector('button[data-key]').innerText === said", said)
        notebook.interrupt()
        notebook.wait_for_output(1, "■")
        notebook.wait_until_done()
        notebook.wait_until(HAS_NONE, timeout=5)
        shown = notebook.evaluate("() => window.shown")
        assert len(shown) == expected
    assert shown[0].startswith("train: interrupted. 0:")
