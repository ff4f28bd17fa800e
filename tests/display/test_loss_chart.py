"""A click on the small curve opens a chart: losses, also of validation and earlier runs, and what else was logged."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from fixtures.panels import Run

from nb_accelerate.base.records import Curve, Points, draw, kept
from nb_accelerate.base.records.curves import smoothed
from nb_accelerate.notebook.display import logged_values
from nb_accelerate.notebook.display.drawing import html
from nb_accelerate.notebook.display.drawing.html import draw_losses, is_loss_of_validation
from nb_accelerate.notebook.display.logged_values import earlier_runs, remember
from nb_accelerate.notebook.display.view import View

NOISY: Points = tuple((10.0 * step, 2 * math.exp(-step / 40) + 0.05 * (-1) ** step + 0.1) for step in range(1, 101))


@pytest.fixture(autouse=True)
def no_earlier_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged_values, "_earlier", [])
    monkeypatch.setattr(kept, "records", {})


def labels(chart: str) -> list[str]:
    return [element.get("data-t", "") for element in ET.fromstring(chart).iter("i")]


def legend(chart: str) -> list[str]:
    paragraph = ET.fromstring(chart).find("p")
    assert paragraph is not None
    return ["".join(span.itertext()).strip() for span in paragraph.findall("span")]


def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_scale_and_another_is_not() -> None:
    far = tuple((float(step), 10.0 * 0.9**step) for step in range(60))
    assert "loss, logarithmic" in labels(draw_losses(far))
    near = tuple((float(step), 3.0 - step / 60) for step in range(60))
    assert {"loss", "2.2", "2.4", "2.6", "2.8"} <= set(labels(draw_losses(near)))
    below_zero = tuple((float(step), 5.0 - step) for step in range(60))
    assert "loss" in labels(draw_losses(below_zero))


def test_points_that_are_higher_are_drawn_higher_on_both_scales() -> None:
    for values in ((1.0, 2.0, 1.5), (1.0, 200.0, 30.0)):
        chart = draw_losses(tuple(enumerate(values)))
        line = re.search(r'points="([^"]+)"', chart)
        assert line is not None
        low, high, middle = (float(point.split(",")[1]) for point in line[1].split())
        assert high < middle < low


def test_a_smoothed_loss_has_less_noise_comes_in_time_and_stands_beside_what_was_measured() -> None:
    exact = [2 * math.exp(-step / 40) + 0.1 for step in range(1, 101)]
    errors = [abs(value - true) for (_, value), true in zip(smoothed(NOISY), exact, strict=True)]
    assert max(errors[5:-5]) < 0.02  # of 0.05; a mean of the past alone is 0.2 too high where it falls fast
    assert legend(draw_losses(NOISY)) == ["loss, smoothed", "each step"]
    assert legend(draw_losses(NOISY[:20])) == ["loss"]


def test_a_loss_that_was_not_finite_interrupts_its_lines() -> None:
    lost = (41, 42, 60, 99)
    chart = draw_losses(tuple((step, math.nan if at in lost else loss) for at, (step, loss) in enumerate(NOISY)))
    assert [len(line.split()) for line in re.findall(r'points="([^"]+)"', chart)] == [41, 17, 38] * 2


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("val_loss", True), ("eval/loss", True), ("valid-loss", True), ("loss", False), ("accuracy", False)],
)
def test_losses_of_validation_are_known_by_their_names(name: str, is_one: bool) -> None:
    assert is_loss_of_validation(name) is is_one


def test_other_values_have_low_charts_over_the_same_steps() -> None:
    logged = [Curve("val_loss", ((300.0, 1.5), (600.0, 0.9))), Curve("lr", ((1.0, 0.001), (500.0, 0.0005)))]
    chart = draw_losses(NOISY, logged)
    assert "val_loss" in legend(chart)
    assert "lr" in labels(chart)


def without_pictures(markup: str) -> str:
    """What is left to read where a site drops the tags of pictures and keeps their text."""
    return " ".join(re.sub(r"<[^>]*>", "", re.sub(r"<(style|script)\b.*?</\1>", "", markup, flags=re.S)).split())


def test_where_tags_are_dropped_no_numbers_of_axes_are_left() -> None:
    assert without_pictures(draw_losses(NOISY, [Curve("lr", ((1.0, 0.001), (500.0, 0.0005)))])) == (
        "loss, smoothed each step"
    )
    assert without_pictures(draw(Curve("accuracy", ((1.0, 0.25), (9.0, 0.5))), [Curve("before", NOISY)])) == (
        "accuracy 0.5"
    )
    said = without_pictures(html.render(trained(lr=0.01).view))
    assert " loss from 2 to 0.05 loss, smoothed val_loss constant: lr 0.01" in said


def test_while_a_run_is_on_its_chart_has_fewer_points_and_ends_where_the_loss_does() -> None:
    now, then = draw_losses(NOISY, is_on=True), draw_losses(NOISY)
    (points_now, *_), (points_then, *_) = (re.findall(r'points="([^"]+)"', one) for one in (now, then))
    assert 20 < len(points_now.split()) <= 31 < len(points_then.split()) == 100
    assert points_now.split()[-1].startswith("1000,")
    assert legend(now) == ["loss, smoothed"]


def test_strange_values_make_no_strange_chart() -> None:
    flat: Points = ((1.0, 0.0), (2.0, 0.0))
    huge: Points = ((1.0, 1e300), (2.0, 1e-300), (3.0, 5.0))
    least: Points = ((1.0, 0.0), (2.0, 5e-324))
    greatest: Points = ((1.0, -1.7e308), (2.0, 1.7e308))
    for loss in (flat, huge, least, greatest, ((1.0, 3.0), (2.0, 3.0))):
        chart = draw_losses(loss, [Curve("<script>", ((1.0, 2.0),))])
        ET.fromstring(chart)
        assert "nan" not in chart
        assert "<script>" not in chart


def trained(name: str = "train", **scalars: float) -> Run:
    run = Run(2, name=name)
    run.begin_loop()
    for step in range(1, 41):
        run.put(step=step, loss=2.0 / step, scalars={**scalars, "val_loss": 3.0 - step // 10})
        run.wait(0.125)
    return run


def test_what_is_logged_is_collected_and_shown_when_the_small_curve_is_opened() -> None:
    view = trained(lr=0.01).view
    curves = {curve.name: curve.points for curve in view.logged}
    assert curves["lr"] == ((1.0, 0.01),)
    assert [value for _, value in curves["val_loss"]] == [3.0, 2.0, 1.0, 0.0, -1.0]
    assert "<details" in html.render(view)
    assert "val_loss" in html.render(view)
    assert "<details" not in html.render(Run(2).view), "there is nothing to show yet"


def test_the_training_loss_is_drawn_once() -> None:
    assert "loss" not in {curve.name for curve in trained(loss=0.5).view.logged}


def test_a_constant_is_said_in_words() -> None:
    chart = draw_losses(NOISY, [Curve("lr", ((1.0, 0.001), (9.0, 0.001))), Curve("rank", ((1.0, 0.0),))])
    assert "lr 0.001 · rank" in without_pictures(chart)
    assert chart.count('role="img"') == 1
    assert without_pictures(draw(Curve("lr", ((1.0, 0.001), (9.0, 0.001))))) == "lr 0.001"
    assert "<svg" not in draw(Curve("lr", ((1.0, 0.001), (9.0, 0.001))))
    assert "<svg" in draw(Curve("lr", ((1.0, 0.001),)), [Curve("before", ((1.0, 0.1),))])


def end(name: str, **config: Any) -> None:
    remember(trained(name).end(), config, 1.0)


def test_earlier_runs_are_called_by_the_settings_in_which_they_differ() -> None:
    end("train", lr=0.1, depth=3)
    end("other", lr=0.1)
    end("train", lr=0.5, depth=3)
    own, before = earlier_runs("train", {"lr": 0.9, "depth": 3})
    assert (own, [curve.name for curve in before]) == ("lr=0.9", ["lr=0.1", "lr=0.5"])
    assert legend(draw_losses(NOISY, (), before, own)) == ["loss, lr=0.9, smoothed", "each step", "lr=0.5", "lr=0.1"]


def test_earlier_runs_with_the_same_settings_are_called_by_the_time_of_their_end() -> None:
    for name in ("train", "other", "train", "cell 3", "cell 9"):
        end(name, lr=0.1)
    own, before = earlier_runs("cell 12", {"lr": 0.1})
    assert (own, [curve.name.partition(",")[0] for curve in before]) == ("", ["cell 3", "cell 9"])
    shown = legend(draw_losses(NOISY, (), earlier_runs("train", {"lr": 0.1})[1]))
    assert [bool(re.fullmatch(r"train, \d\d:\d\d:\d\d", one)) for one in shown] == [False, False, True, True]


def test_what_the_panel_saw_is_a_run_also_of_a_few_steps_and_no_curve_behind_later_ones() -> None:
    remember(Run(2).end(), {}, 1.0)
    assert not kept.runs(), "it has trained nothing"
    few = Run(2)
    few.begin_loop()
    few.put(step=1, loss=2.0)
    few.wait(0.125)
    remember(few.end(), {"lr": 0.1}, 1.0)
    assert [(run.config, run.last("loss"), run.ended) for run in kept.runs()] == [({"lr": 0.1}, 2.0, "done")]
    assert earlier_runs("train", {}) == ("", ())


def test_a_chart_that_is_open_stays_open_when_the_panel_is_drawn_again() -> None:
    view = trained().view
    assert "<script>" not in html.render(view), "a panel that is drawn once needs none"
    with_key = html.render(View(**{**vars(view), "key": "a1b2"}))
    assert 'data-nba="a1b2"' in with_key
    assert "querySelectorAll('details[data-nba^=\"a1b2\"]')" in with_key
