"""How far a run is stands in the title of the page, while it runs and no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browser.test_panel import SETUP, launch, start

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
