"""A panel as HTML, with styles and without, and as text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from html.parser import HTMLParser

import pytest
from fixtures.panels import Run
from hypothesis import given, settings, strategies as st

from nb_accelerate.base import words
from nb_accelerate.base.progress_page import Bar, Phase
from nb_accelerate.base.topology import rank_lists
from nb_accelerate.notebook.display.drawing import html, text
from nb_accelerate.notebook.display.logged_values import ThinnedCurve
from nb_accelerate.notebook.display.view import FailureSummary, View
from nb_accelerate.notebook.display.widgets.controls import stacks_as_html

VOID = {"br", "hr", "img", "input", "meta"}


class Strict(HTMLParser):
    """Fails where a tag is closed that is not the one that is open; `said` is what is read without styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.said: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of <{tag}> twice: {names}"
        assert re.fullmatch("[a-z0-9]+", tag), tag
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title"} & set(self.open) and data.strip():
            self.said.append(data.strip())


def running(number: int = 2, name: str = "train") -> Run:
    run = Run(number, name=name)
    run.begin_loop(total=80)
    run.put(memory=840_000_000)
    losses = iter(range(100, 0, -1))

    def each() -> None:
        run.put(loss=next(losses) / 10)
        run.step_of(run.ranks)

    run.wait(5.0, each)
    return run


def starting(number: int = 2) -> Run:
    return Run(number, started=False)


def busy() -> View:
    run = running()
    run.put([0], utilisation=97)
    run.put([1], utilisation=12)
    run.look()
    return run.view


@functools.cache
def views() -> dict[str, View]:
    failed = running()
    failed.put([1], state="failed")
    failed.look()
    failure = FailureSummary(ranks=(1,), what="ValueError", label="traceback of rank 1", details="a\nb")
    stalled = running(3)
    stalled.put([1], phase=Phase.RUNNING)
    stalled.put([0, 2], phase=Phase.BACKWARD)
    stalled.wait(9.0)
    bars = running()
    bars.put(
        bars=(
            Bar(label="epochs", text="1/30 [00:05<02:25,  5.00s/it]", count=1, total=30, seconds=5.0),
            Bar(label="", text="3it [00:00, ?it/s]", count=3, total=None, seconds=0.0),
        )
    )
    bars.look()
    return {
        "starting": starting().view,
        "running": running().view,
        "stalled": stalled.view,
        "bars": bars.view,
        "one": running(1).view,
        "many": running(64).view,
        "many starting": starting(64).view,
        "on GPUs": busy(),
        "done": running().end(),
        "many done": running(64).end(),
        "failed": failed.end("failed", failure),
        "interrupted": running(13).end("interrupted"),
    }


@pytest.mark.parametrize("name", views())
def test_every_tag_is_closed_and_nothing_is_loaded_or_run(name: str):
    source = html.style() + html.render(views()[name])
    page = Strict(source)
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "http" not in source
    assert "url(" not in source
    assert not re.search(r"\son\w+=", source)


def without_chart(source):
    """What is read before somebody opens the chart."""
    return re.sub(r'(?s)<details class="nba-chart".*?</details>', "", source)


def test_without_styles_there_is_a_heading_a_table_and_sentences():
    page = Strict(without_chart(html.render(views()["stalled"])))
    said = " ".join(page.said)
    assert said.startswith("● train 3 ranks · CPU · gloo 0:14 · no step for 9 s rank ")
    header = page.said[page.said.index("rank") : page.said.index("now") + 1]
    assert header == ["rank", "step", "epoch", "it/s", "loss", "memory", "now"]
    cells = page.said[page.said.index("now") + 1 :][:8]
    assert cells == ["0, 2", "40", "/ 80", "1", "0", "6.1000", "840 MB", "backward"]
    assert "Rank 1 has not moved for 9 s; ranks 0 and 2 wait for it." in page.said
    assert page.tags.count("tr") == 3


def test_a_run_that_is_done_folds_its_ranks_away_but_says_how_it_was():
    page = Strict(html.render(views()["done"]))
    assert "details" in page.tags
    assert page.said[0] == "✓"
    assert "40 steps" in " ".join(page.said)
    assert "2 ranks" in " ".join(page.said)


def test_of_a_rank_whose_loss_is_nan_the_loss_is_marked_and_not_what_it_does():
    run = running()
    run.put([1], loss=float("nan"))
    run.look()
    source = html.render(run.view)
    assert source.count("nba-not-finite") == 1
    assert '<tr class="nba-bad nba-runs">' in source
    failure = FailureSummary(ranks=(1,), what="ValueError", label="traceback of rank 1", details="a")
    assert '<tr class="nba-bad">' in html.render(run.end("failed", failure))


def test_the_small_curve_is_interrupted_where_the_loss_was_not_finite():
    run = running()
    run.put(loss=float("nan"))
    run.wait(1.0, lambda: run.step_of(run.ranks))
    for loss in range(20):
        run.put(loss=1.0 + loss)
        run.wait(0.125, lambda: run.step_of(run.ranks))
    (path,) = re.findall(r'<path d="(M[^"]*)" fill="none" stroke="#2a78d6"', html.render(run.view))
    assert path.count("M") == 2


def test_warnings_stand_above_advice_and_where_the_time_went_is_folded_away():
    view = dataclasses.replace(views()["done"], warnings=("Wrong.",), advice="Do this.", times="forward 75 %")
    source = html.render(view)
    order = ["<summary>ranks", "time: forward 75\u00a0%", "</details>", "Wrong.", "Do this."]
    places = [source.rindex(one) if one == "</details>" else source.index(one) for one in order]
    assert places == sorted(places)


def test_a_drawing_that_is_followed_by_others_is_marked_as_one_that_can_become_old():
    view = views()["running"]
    assert "No news since 02:03:04." in html.render(view, at="02:03:04")
    assert "nba-live" in html.render(view, at="02:03:04")
    assert "nba-live" not in html.render(view)


def test_a_failure_has_its_traceback_folded():
    source = html.render(views()["failed"])
    assert "rank 1</summary><pre>a\nb</pre>" in source
    assert "ValueError" in Strict(source).said


def test_many_ranks_are_one_row_that_reads_well_without_styles():
    said = Strict(without_chart(html.render(views()["many"]))).said
    assert "0-63" in said
    assert len(said) < 28


def test_each_rank_has_a_line_below_the_row_of_all_with_what_it_does_if_others_do_not():
    run = running(4)
    run.put([1], loss=9.5, phase=Phase.SAVING)
    run.put([0, 2, 3], phase=Phase.FORWARD)
    run.wait(3.0)
    source = html.render(run.view)
    (lines,) = re.findall(r"(?s)<pre [^>]*>(.*?)</pre>", source)
    assert [line.split("\t") for line in re.sub("<[^>]*>", "", lines).split("\n")] == [
        ["rank", "loss", "memory"],
        ["0", "6.1000", "840 MB"],
        ["1", "9.5000", "840 MB", "saving"],
        ["2", "6.1000", "840 MB"],
        ["3", "6.1000", "840 MB"],
    ]
    assert "each rank" not in html.render(running(2).view)
    assert "each rank" not in html.render(starting(4).view), "there is nothing to say yet"
    assert "<summary>each rank</summary>" in html.render(run.end("interrupted"))


def test_ranks_on_several_machines_have_the_name_of_theirs_as_a_hint_and_in_their_lines():
    run = running(4)
    assert "on a" not in html.render(run.view)
    for rank, machine in enumerate(["a", "a", "b<", "b<"]):
        run.ranks[rank] = dataclasses.replace(run.ranks[rank], machine=machine)
    run.put([0, 1, 2], phase=Phase.FORWARD)
    run.put([3], phase=Phase.SAVING)
    run.wait(3.0)
    source = html.render(run.view)
    assert ' title="on a, b&lt;">0-3</td>' in source
    (lines,) = re.findall(r"(?s)<pre [^>]*>(.*?)</pre>", source)
    assert [line.split("\t")[3] for line in re.sub("<[^>]*>", "", lines).split("\n")] == [
        *("machine", "a", "a", "b&lt;", "b&lt;")
    ]


HOSTILE = "<b>\"'&</b><script>alert(1)</script>"


def test_names_and_messages_and_tracebacks_are_text_whatever_is_in_them():
    run = running(2, name=HOSTILE)
    run.put(bars=(Bar(label=HOSTILE, text=HOSTILE, count=1, total=2, seconds=1.0),))
    run.put([0], scalars={HOSTILE: 1.0})
    run.look()
    failure = FailureSummary(ranks=(0,), what=HOSTILE, label=HOSTILE, details=HOSTILE)
    for view in (run.view, run.end("failed", failure)):
        page = Strict(html.render(view))
        assert "script" not in page.tags
        assert page.tags.count("b") == 1, "that of the heading"
        assert HOSTILE in page.said
    assert page.said.count(HOSTILE) >= 3


@given(name=st.text(max_size=30), label=st.text(max_size=30), details=st.text(max_size=60))
@settings(deadline=None, max_examples=40)
def test_no_text_breaks_out_of_its_place(name: str, label: str, details: str):
    run = Run(2, name=name)
    run.put(bars=(Bar(label=label, text=details, count=1, total=2, seconds=1.0),))
    run.look()
    plain = Strict(html.render(Run(2).view)).tags
    assert Strict(html.render(Run(2, name=name).view)).tags == plain
    Strict(html.render(run.end("failed", FailureSummary(ranks=(0,), what=label, label=name, details=details))))


# Text.


def columns(table: str) -> list[str]:
    return table.splitlines()[1:]


def test_a_table_is_aligned_to_the_right_but_for_its_last_column():
    run = running(9)
    run.put([0, 7], state="failed")
    run.look()
    head, *rows = columns(text.table(run.view))
    assert head.split() == ["rank", "step", "epoch", "it/s", "loss", "memory", "now"]
    for title in ("rank", "step", "epoch", "it/s", "loss", "memory"):
        end = head.index(title) + len(title)
        for row in rows:
            assert row[end - 1] != " ", (title, row)
            assert row[end : end + 2] == "  ", (title, row)
    assert len({row.index(row.split("  ")[-1]) for row in rows}) == 1
    assert [row[: head.index("rank") + 4].strip() for row in rows] == ["1-6, 8", "0", "7"]


def test_columns_that_nobody_uses_are_left_out():
    assert columns(text.table(starting().view)) == ["rank  now", "   0  importing torch", "   1  importing torch"]


def test_how_busy_devices_are_is_a_column():
    view = busy()
    said = Strict(html.render(view)).said
    assert [said.count(one) for one in ("GPU", "97 %", "12 %")] == [1, 1, 1]
    lines = text.table(view).splitlines()
    assert lines[1].split()[-2:] == ["GPU", "now"]
    assert [line[lines[1].index("GPU") + 3 - 4 :][:4] for line in lines[2:]] == ["97 %", "12 %"]


def test_a_bar_is_as_long_as_what_is_done():
    table = text.table(running().view, bars=True)
    assert "━" * 6 + "╌" * 6 in table
    assert "━" not in text.table(running().view)


def test_the_row_of_a_rank_that_failed_says_so_and_warnings_are_at_the_end_of_a_table():
    assert text.table(views()["failed"]).splitlines()[-1].endswith("  ValueError")
    assert text.table(views()["stalled"]).splitlines()[-1:] == [*views()["stalled"].warnings]


def test_a_line_has_what_one_wants_to_know():
    run = running()
    assert text.line(run.view) == "train: 0:05, step 40/80 (50 %) of epoch 1, 8.00 it/s, loss 6.1000, " + ", ".join(
        run.view.outlook
    )
    assert text.line(run.end()).startswith("train: done in 0:05, 40 steps, ")


def test_a_line_leaves_out_what_is_not_known_yet():
    run = Run(2)
    run.begin_loop(total=80)
    run.train(0.25)
    assert text.line(run.view).endswith(" of epoch 1")


@pytest.mark.parametrize("name", views())
def test_lines_have_no_control_characters(name: str):
    view = views()[name]
    assert "\n" not in text.line(view)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text.line(view) + text.table(view, bars=True))


# Bars.


def test_bars_stand_below_the_table_with_their_labels_and_what_tqdm_writes():
    view = views()["bars"]
    *_, first, second = text.table(view, bars=True).splitlines()
    assert first == "epochs  ╌╌╌╌╌╌╌╌╌╌╌╌  1/30 [00:05<02:25,  5.00s/it]"
    assert second.split() == ["3it", "[00:00,", "?it/s]"]
    page = html.render(view)
    assert page.index("</table>") < page.index('<div class="nba-bars">')
    assert page.count('aria-label="epochs"') == 1
    assert "epochs 1/30 [00:05<02:25,  5.00s/it]" in text.line(view)
    for width in (20, 40, 60):
        assert max(map(len, text.lines(view, width, bars=True))) <= width


# ThinnedCurve.


@given(steps=st.lists(st.integers(0, 40), max_size=1500))
@settings(deadline=None, max_examples=40)
def test_a_thinned_curve_keeps_the_first_and_the_last_and_its_order(steps: list[int]):
    curve = ThinnedCurve()
    step, added = 0, []
    for more in steps:
        step += more
        curve.add(step, float(len(added)))
        if added and added[-1][0] == step:
            added[-1] = (float(step), float(len(added) - 1))
            curve.add(step, added[-1][1])
        else:
            added.append((float(step), float(len(added))))
    points = list(curve.points)
    assert len(points) <= 240
    assert points[:1] == added[:1]
    assert points[-1:] == added[-1:]
    assert points == sorted(points)
    assert set(points) <= set(added)
    if len(added) < 240:
        assert points == added or len(added) > 238


def test_a_long_curve_is_spread_evenly():
    curve = ThinnedCurve()
    for step in range(100_000):
        curve.add(step, 1.0)
    steps = [point[0] for point in curve.points]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert 100 <= len(steps) <= 240
    assert max(gaps) <= 2 * min(gaps[:-1])


def test_the_newest_loss_at_a_step_is_its_loss_and_older_steps_change_nothing():
    curve = ThinnedCurve()
    for step, loss in ((1, 5.0), (2, 4.0), (2, 3.0), (1, 9.0)):
        curve.add(step, loss)
    assert curve.points == ((1.0, 5.0), (2.0, 3.0))


# Words.


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0:00"),
        (42.9, "0:42"),
        (727, "12:07"),
        (11112, "3:05:12"),
        (360000, "100:00:00"),
        (-5, "0:00"),
        (float("inf"), "277777:46:40"),
    ],
)
def test_durations(seconds: float, said: str):
    assert words.duration(seconds) == said


@pytest.mark.parametrize(
    ("ranks", "said", "named"),
    [
        ([0], "0", "rank 0"),
        ([0, 1], "0, 1", "ranks 0 and 1"),
        ([2, 0, 1], "0-2", "ranks 0-2"),
        ([0, 2, 3], "0, 2, 3", "ranks 0, 2 and 3"),
        ([5, 0, 1, 2], "0-2, 5", "ranks 0-2 and 5"),
        (range(63), "0-62", "ranks 0-62"),
    ],
)
def test_ranks_are_named_as_short_as_can_be(ranks: list[int], said: str, named: str):
    assert (rank_lists.ranges(ranks), rank_lists.named(ranks)) == (said, named)


@given(ranks=st.sets(st.integers(0, 80), min_size=1))
@settings(deadline=None)
def test_ranges_say_just_these_ranks(ranks: set[int]):
    read = set()
    for part in rank_lists.ranges(list(ranks)).split(", "):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0.0000"),
        (2.34567, "2.3457"),
        (123.456, "123.46"),
        (0.00012, "1.20e-04"),
        (250_000.0, "2.50e+05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_losses(value: float, said: str):
    assert words.measured(value) == said


def test_counts_rates_sizes_and_spans():
    assert [words.count(n) for n in (1800, 2.5)] == ["1,800", "2.50"]
    assert [words.rate(n) for n in (0, 0.5, 12.34, 1234.5)] == ["0", "0.50", "12.3", "1,234"]
    assert [words.size(n) for n in (840e6, 11.2e9)] == ["840 MB", "11.2 GB"]
    assert [words.brief(n) for n in (12.4, 119, 180)] == ["12 s", "119 s", "3 min"]
    assert [words.plural(n, "rank") for n in (1, 1200)] == ["1 rank", "1,200 ranks"]


def test_stacks_have_users_frames_first_and_those_of_libraries_in_one_line_that_unfolds():
    frames = {1: (["train, cell 1 line 4"], ["send<, /x/a.py:1", "write, /x/b.py:2"]), 0: (["no answer"], [])}
    source = stacks_as_html(frames)
    order = ["rank 0", "no answer", "rank 1", "train, cell 1 line 4", "send&lt;, /x/a.py:1 ← write", "</summary>"]
    order += ["send&lt;, /x/a.py:1</div>", "write, /x/b.py:2</div>", "</details>"]
    assert [source.index(part) for part in order] == sorted(source.index(part) for part in order)
    assert "no answer yet" in stacks_as_html({})
