"""The panel for people who see little, or use no mouse: what axe-core says, and how far bars stand out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browser.server import THEMES
from browser.test_panel import SETUP, launch, start, wait_for_percent

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.notebook import Notebook

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

LEAST_CONTRAST = 3.0
"""Of what is drawn against its ground, as WCAG 2.2 asks for in 1.4.11. For text axe-core looks itself: 4.5."""

# The contrast of each bar, least first. Colours have no transparency there.
CONTRASTS = """() => {
    const channels = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => channels(color).slice(0, 3).map(one => one / 255)
        .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
        .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
    const isSolid = color => channels(color).length === 3;
    const own = one => getComputedStyle(one).backgroundColor;
    const ground = one => {
        while (one.parentElement && !isSolid(own(one.parentElement))) { one = one.parentElement; }
        return own(one.parentElement);
    };
    return [...document.querySelectorAll('.nba .nba-fill')].filter(one => isSolid(own(one)))
        .map(one => [light(own(one)), light(ground(one)), one.className])
        .map(([a, b, name]) => [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), name])
        .sort((a, b) => a[0] - b[0]);
}"""


def check(notebook: Notebook) -> None:
    for theme in THEMES:
        notebook.change_theme(theme)
        assert notebook.violations(".nba", ".nba-asides") == [], theme
        contrasts = notebook.evaluate(CONTRASTS)
        assert contrasts
        assert contrasts[0][0] >= LEAST_CONTRAST, (theme, contrasts[0])


def test_axe_finds_nothing_serious_in_a_panel_that_runs_or_has_ended(open_notebook: OpenNotebook) -> None:
    cells = [SETUP, launch(3, steps=4000, pause=0.02, slow=1), launch(2, steps=60, wrong=1)]
    notebook = open_notebook(cells)
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_for_output(1, "slower than the", timeout=40)
    wait_for_percent(notebook, 0, rows=2)
    notebook.click(".nba-each > summary")
    for title, said in (("More", "Log"), ("Log", "nothing yet"), ("Stacks", "train, cell 1")):
        notebook.press_button(1, title)
        notebook.wait_for_output(1, said)
        assert notebook.violations(".nba", ".nba-asides") == [], title
    check(notebook)
    notebook.press_button(1, "Interrupt")
    notebook.wait_until_done()
    start(notebook, 2)
    notebook.wait_for_output(2, "✗", timeout=60)
    notebook.wait_until_done()
    notebook.evaluate("() => document.querySelectorAll('.nba details').forEach(one => { one.open = true; })")
    check(notebook)
