"""The small curve of the loss in a panel, and the pictures of what was logged below it."""

from __future__ import annotations

import dataclasses
import math
import re
import xml.etree.ElementTree as ET

import pytest
from fixtures.panels import Run

from nb_accelerate.base.records import Curve, Points, draw, kept
from nb_accelerate.notebook.display.drawing import html
from nb_accelerate.notebook.display.logged_values import earlier_losses, remember

NOISY: Points = tuple((10.0 * step, 2 * math.exp(-step / 40) + 0.05 * (-1) ** step + 0.1) for step in range(1, 101))


def lines(picture: str) -> list[list[tuple[float, float]]]:
    """The positions of each line, earlier runs first."""
    found = re.findall(r'points="([^"]+)"', picture)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in found]  # type: ignore[misc]


def labels(picture: str) -> list[str]:
    return [element.get("data-t", "") for element in ET.fromstring(picture).iter("i")]


def test_points_that_are_higher_are_drawn_higher_beside_their_labels() -> None:
    picture = draw(Curve("loss", ((1.0, 1.0), (2.0, 2.0), (3.0, 1.5))))
    ((_, low), (_, high), (_, middle)) = lines(picture)[0]
    assert high < middle < low
    assert labels(picture) == ["1", "1.5", "2", "1", "1.5", "2", "2.5", "3", "step"]


def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_scale() -> None:
    picture = draw(Curve("loss", ((1.0, 100.0), (2.0, 10.0), (3.0, 1.0))))
    (first, second, third) = (at for _, at in lines(picture)[0])
    assert second - first == pytest.approx(third - second, abs=0.2)
    assert labels(picture)[:3] == ["1", "10", "100"]


def test_an_earlier_run_is_drawn_behind_on_the_same_scale() -> None:
    before, now = lines(draw(Curve("loss", ((1.0, 1.0), (2.0, 2.0))), [Curve("loss", ((1.0, 2.0), (2.0, 3.0)))]))
    assert before[0][1] == now[1][1]
    assert before[1][1] < before[0][1]


def test_a_loss_that_was_not_finite_interrupts_its_lines() -> None:
    lost = (41, 42, 60, 99)
    points = tuple((step, math.nan if at in lost else loss) for at, (step, loss) in enumerate(NOISY))
    assert [len(line) for line in lines(draw(Curve("loss", points)))] == [41, 17, 38]


def without_pictures(markup: str) -> str:
    """What is left to read where a site drops the tags of pictures and keeps their text."""
    return " ".join(re.sub(r"<[^>]*>", "", re.sub(r"<(style|script)\b.*?</\1>", "", markup, flags=re.S)).split())


def test_where_tags_are_dropped_no_numbers_of_axes_are_left() -> None:
    picture = draw(Curve("accuracy", ((1.0, 0.25), (9.0, 0.5))), [Curve("before", NOISY)])
    assert without_pictures(picture) == "accuracy 0.5"


def test_strange_values_make_no_strange_picture() -> None:
    flat: Points = ((1.0, 0.0), (2.0, 0.0))
    huge: Points = ((1.0, 1e300), (2.0, 1e-300), (3.0, 5.0))
    least: Points = ((1.0, 0.0), (2.0, 5e-324))
    greatest: Points = ((1.0, -1.7e308), (2.0, 1.7e308))
    lost: Points = ((1.0, math.nan), (2.0, math.inf))
    for points in (flat, huge, least, greatest, lost, ((1.0, 3.0), (2.0, 3.0)), ((1.0, 3.0), (1.0, 4.0)), ()):
        picture = draw(Curve("<script>", points))
        ET.fromstring(picture)
        assert "nan" not in picture
        assert "<script>" not in picture


def trained(name: str = "train", **scalars: float) -> Run:
    run = Run(2, name=name)
    run.begin_loop()
    for step in range(1, 41):
        run.put(step=step, loss=2.0 / step, scalars={**scalars, "val_loss": 3.0 - step // 10})
        run.wait(0.125)
    return run


def test_what_is_logged_is_collected() -> None:
    view = trained(lr=0.01).view
    curves = {curve.name: curve.points for curve in view.logged}
    assert curves["lr"] == ((1.0, 0.01),)
    assert [value for _, value in curves["val_loss"]] == [3.0, 2.0, 1.0, 0.0, -1.0]
    assert "loss from 2 to 0.05" in html.render(view)
    assert "<details" not in html.render(Run(2).view), "there is nothing to show yet"


def test_a_click_on_the_small_curve_shows_the_losses_of_the_last_three_runs_of_the_same_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "records", {})
    for name in ("train", "train", "other", "cell 3", "train", "train"):
        remember(trained(name).end(), {}, 1.0)
    assert [curve.name for curve in earlier_losses("train")] == ["train-2", "train-3", "train-4"]
    assert [curve.name for curve in earlier_losses("cell 12")] == ["cell 3"]
    view = dataclasses.replace(trained().view, before=earlier_losses("train"))
    source = html.render(view)
    assert '<details class="nba-chart">' in source
    assert len(lines(source)) == 4


def test_the_training_loss_is_no_other_value() -> None:
    assert "loss" not in {curve.name for curve in trained(loss=0.5).view.logged}


def test_a_constant_is_said_in_words() -> None:
    assert without_pictures(draw(Curve("lr", ((1.0, 0.001), (9.0, 0.001))))) == "lr 0.001"
    assert "<svg" not in draw(Curve("lr", ((1.0, 0.001), (9.0, 0.001))))
    assert "<svg" in draw(Curve("lr", ((1.0, 0.001),)), [Curve("before", ((1.0, 0.1),))])


def test_what_the_panel_saw_is_a_run_also_of_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "records", {})
    remember(Run(2).end(), {}, 1.0)
    assert not kept.runs(), "it has trained nothing"
    few = Run(2)
    few.begin_loop()
    few.put(step=1, loss=2.0)
    few.wait(0.125)
    remember(few.end(), {"lr": 0.1}, 1.0)
    assert [(run.config, run.last("loss"), run.ended) for run in kept.runs()] == [({"lr": 0.1}, 2.0, "done")]
