"""A panel in cells of many widths: what is dropped, what wraps, and that columns close up before the bar shrinks."""

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
    const wide = name => cell.querySelector(name).offsetWidth;
    const now = cell.querySelector('td.nba-now div');
    const lines = [...cell.querySelectorAll('td.nba-rank')].map(one => one.getBoundingClientRect().top);
    return {
        width: Number(cell.dataset.width),
        bar: wide('.nba-track'),
        rest: wide('table') - wide('.nba-track'),
        setupIsCut: cell.querySelector('.nba-setup').scrollWidth > cell.querySelector('.nba-setup').clientWidth,
        isCut: now.clientWidth > 1 && now.scrollWidth > now.clientWidth,
        keeps: wide('td.nba-loss') > 0 && wide('td.nba-step') > 0,
        passes: cell.querySelector('table').scrollWidth > cell.querySelector('.nba-inside').clientWidth + 1,
        line: Math.max(...lines.slice(1).map((top, index) => top - lines[index]), 0),
    };
})"""


PLOTS = """() => [...document.querySelectorAll('.cell')].map(cell => {
    const plot = cell.querySelector('.nba-plot'), legend = cell.querySelector('.nba-legend');
    return {
        width: Number(cell.dataset.width),
        plot: plot.offsetWidth,
        drawn: [...plot.querySelectorAll('svg')].map(one => one.getBoundingClientRect().width),
        isCut: legend.scrollWidth > legend.clientWidth,
    };
})"""


def in_cells(chromium: Chromium, source: str, measure: str) -> list[dict[str, Any]]:
    """What a JavaScript function says of `source` in cells of all widths."""
    cells = "".join(
        f'<div class="cell" data-width="{width}" style="width:{width}px">{source}</div>' for width in WIDTHS
    )
    context, page = chromium.open(1300, 800)
    chromium.wait_for(page.set_content(f"<body>{html.style()}{cells}</body>"))
    found: list[dict[str, Any]] = chromium.wait_for(page.evaluate(measure))
    chromium.wait_for(context.close())
    return found


def measured(chromium: Chromium, ranks: int) -> list[dict[str, Any]]:
    run = Run(ranks, name="finetune_classifier")
    run.begin_loop(total=3000)
    run.put(memory=840_000_000, utilisation=97)
    for rank in run.ranks:
        run.put([rank], loss=0.002 + rank)
    run.train(6.0)
    view = run.view
    row = dataclasses.replace(view.rows[0], now="waits in backward", location="cell 1 line 40")
    return in_cells(chromium, html.render(dataclasses.replace(view, rows=(row, *view.rows[1:]))), MEASURE)


@pytest.mark.parametrize("ranks", [2, 8])
def test_columns_close_up_before_the_bar_shrinks_and_each_row_is_one_line(chromium: Chromium, ranks: int) -> None:
    cells = measured(chromium, ranks)
    assert [(cell["width"], cell["bar"]) for cell in cells if cell["bar"] < (90 if cell["width"] >= 450 else 60)] == []
    rest = [cell["rest"] for cell in cells]
    assert max(rest) < 850, "the bar takes the room that is left"
    for what in ("isCut", "setupIsCut", "passes"):
        assert [cell["width"] for cell in cells if cell[what]] == [], what
    assert [cell["width"] for cell in cells if not cell["keeps"]] == []
    assert max(cell["line"] for cell in cells) < 30


def test_curves_of_a_chart_that_is_open_are_as_wide_as_its_axis(chromium: Chromium) -> None:
    run = Run(2)
    run.begin_loop()
    run.train(2.0)
    settings = "state=chart, steps=100, epochs=30, pause=0.05, and a name that is long"
    curve = tuple((float(step), 2.0 - step / 100) for step in range(100))
    chart = html.render(dataclasses.replace(run.view, curve=curve, run_label=settings))
    cells = in_cells(chromium, chart.replace('<details class="nba-chart"', '<details open class="nba-chart"'), PLOTS)
    assert [cell["width"] for cell in cells if any(abs(width - cell["plot"]) > 1 for width in cell["drawn"])] == []
    assert [cell["width"] for cell in cells if len(cell["drawn"]) < 2] == []
    assert [cell["width"] for cell in cells if cell["isCut"]] == []
