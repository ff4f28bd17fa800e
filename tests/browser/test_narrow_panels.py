"""A panel in cells of many widths: what is dropped, what wraps, and that the bar only becomes narrower."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from fixtures.panels import Run

from nb_accelerate.notebook.display.drawing import html

if TYPE_CHECKING:
    from browser.chromium import Chromium

pytestmark = [pytest.mark.browser, pytest.mark.limit(120)]

WIDTHS = (1200, 1080, 1000, *range(950, 270, -10))

MEASURE = """() => [...document.querySelectorAll('.cell')].map(cell => {
    const seen = name => [...cell.querySelectorAll(name)].every(one => one.offsetWidth > 0);
    const now = cell.querySelector('td.nba-now div');
    return {
        width: Number(cell.dataset.width),
        bar: cell.querySelector('.nba-track').getBoundingClientRect().width,
        isCut: now.scrollWidth > now.clientWidth,
        keeps: seen('td.nba-loss') && seen('.nba-total'),
        passes: cell.querySelector('table').scrollWidth > cell.querySelector('.nba-inside').clientWidth + 1,
    };
})"""


def measured(chromium: Chromium) -> list[dict[str, Any]]:
    run = Run(2)
    run.begin_loop(total=3000)
    run.put(memory=840_000_000, loss=2.0, utilisation=97)
    run.train(6.0)
    view = run.view
    row = dataclasses.replace(view.rows[0], now="waits in backward", location="cell 1 line 40")
    source = html.render(dataclasses.replace(view, rows=(row, *view.rows[1:])))
    cells = "".join(
        f'<div class="cell" data-width="{width}" style="width:{width}px">{source}</div>' for width in WIDTHS
    )
    context, page = chromium.open(1300, 800)
    chromium.wait_for(page.set_content(f"<body>{html.style()}{cells}</body>"))
    found: list[dict[str, Any]] = chromium.wait_for(page.evaluate(MEASURE))
    chromium.wait_for(context.close())
    return found


def test_the_narrower_a_cell_the_narrower_its_bar_and_what_matters_stays(chromium: Chromium) -> None:
    cells = measured(chromium)
    bars = [cell["bar"] for cell in cells]
    assert bars == sorted(bars, reverse=True)
    assert bars[-1] >= 60
    for what in ("isCut", "passes"):
        assert [cell["width"] for cell in cells if cell[what]] == [], what
    assert [cell["width"] for cell in cells if not cell["keeps"]] == []
