"""The panel in terminals of any width, with colours and without."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from nb_accelerate.notebook.display.drawing import text
from nb_accelerate.notebook.display.view import Facts, Row, View

FIGURES = {"epoch": "1", "rate": "21.4", "loss": "0.6878", "memory": "281 MB", "gpu": "98 %"}


def view_of(state: str = "running") -> View:
    rows = [
        Row(ranks="0", share=0.5, step="30 / 60", now="forward, line 6", kind="late", **FIGURES),
        Row(ranks="1", share=0.4, step="24 / 60", now="ValueError", kind="bad", **FIGURES),
    ]
    facts = Facts(name="train.py", setup=("2 ranks", "CPU", "gloo"))
    return View(
        state=state,  # type: ignore[arg-type]
        facts=facts,
        elapsed="0:16",
        outlook=("342 samples/s", "0:20 left"),
        rows=tuple(rows),
        warnings=("Rank 1 is slower than the other: it waits for data for half of the time.",),
    )


def plain(lines: list[str]) -> list[str]:
    return [re.sub(r"\x1b\[\d+m", "", line) for line in lines]


def test_a_wide_terminal_has_all_that_the_table_has():
    assert text.lines(view_of(), 200, color=False) == text.table(view_of()).split("\n")
    assert text.lines(view_of(), 200, color=False, bars=True) == text.table(view_of(), bars=True).split("\n")


@pytest.mark.parametrize("color", [True, False])
def test_no_line_is_wider_than_the_terminal(color: bool):
    for width in range(8, 120):
        lines = text.lines(view_of(), width, color=color, bars=True)
        assert max(map(len, plain(lines))) <= width
        assert plain(lines) == text.lines(view_of(), width, color=False, bars=True)


def test_columns_are_left_out_rather_than_cut():
    titles = {width: text.lines(view_of(), width, color=False, bars=True)[1].split() for width in (100, 62, 52, 40, 30)}
    assert titles == {
        100: ["rank", "step", "epoch", "it/s", "loss", "memory", "GPU", "now"],
        62: ["rank", "step", "epoch", "it/s", "loss", "now"],
        52: ["rank", "step", "it/s", "loss", "now"],
        40: ["rank", "step", "now"],
        30: ["rank", "step", "now"],
    }
    head, _, first, *_, last = text.lines(view_of(), 40, color=False, bars=True)
    assert head.split(" · ") == ["● train.py", "0:16", "342 samples/s"]
    assert first.startswith("   0  ━━━╌╌╌  30 / ")
    assert last.endswith("of the time.")  # what is wrong is said whole, on several lines


def test_colours_are_for_what_is_wrong_and_what_is_done():
    lines = text.lines(view_of("failed"), 100, color=True)
    assert lines[0].startswith("\x1b[31m✗\x1b[0m ")
    assert lines[1].startswith("\x1b[2m")
    assert lines[2].endswith("\x1b[33mforward, line 6\x1b[0m")
    assert lines[3].endswith("\x1b[31mValueError\x1b[0m")
    done = view_of("done")
    assert text.lines(done, 100, color=True)[0].startswith("\x1b[33m!")
    assert text.lines(replace(done, warnings=()), 100, color=True)[0].startswith("\x1b[32m✓")


@pytest.mark.parametrize(
    ("variables", "is_terminal", "expected"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
    ],
)
def test_colours_are_for_terminals_and_can_be_switched_off(
    variables: dict[str, str], is_terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert text.can_color(Stream()) is expected
