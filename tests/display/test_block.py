"""The panel in a terminal, drawn over itself."""

from __future__ import annotations

import pytest
from fixtures.screens import Stream

from nb_accelerate.notebook.display.drawing.block import Block, can_redraw
from nb_accelerate.notebook.display.view import Facts, Row, View


def view_of(step: int, name: str = "train") -> View:
    row = Row(ranks="0", share=step / 10, step=f"{step} / 10", now="forward")
    return View(state="running", facts=Facts(name=name, setup=("1 rank",)), elapsed="0:01", rows=(row,))


def test_a_new_drawing_takes_the_place_of_the_last():
    stream = Stream()
    block = Block(stream)
    block.draw(view_of(1))
    height = len(stream.screen.lines)
    block.draw(view_of(2))
    assert len(stream.screen.lines) == height
    assert "2 / 10" in stream.screen.text
    assert "1 / 10" not in stream.screen.text


def test_what_is_printed_stands_above_the_block():
    stream = Stream()
    block = Block(stream)
    block.draw(view_of(1))
    block.hide()
    stream.write("epoch 1 done\n")
    block.show()
    assert stream.screen.lines[0] == "epoch 1 done"
    assert "1 / 10" in "\n".join(stream.screen.lines[1:])


@pytest.mark.parametrize("ends", [True, False])
def test_nothing_is_drawn_into_an_unfinished_line(ends: bool):
    stream = Stream()
    block = Block(stream)
    block.draw(view_of(1))
    block.hide()
    stream.write("loading")
    block.draw(view_of(2))
    assert stream.screen.lines == ["loading"]
    if ends:
        stream.write(" done\n")
        block.show()
        assert stream.screen.lines[0] == "loading done"
        assert "2 / 10" in stream.screen.text
    else:
        block.finish(view_of(10), was_drawn=True)
        assert stream.screen.lines[0] == "loading"
        assert "10 / 10" in stream.screen.text


def test_a_line_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "24")
    stream = Stream()
    Block(stream).draw(view_of(1, name="a_function_with_a_name_that_takes_some_room"))
    assert max(map(len, stream.screen.lines)) < 30


def test_at_the_end_the_block_is_a_table_that_stays():
    stream = Stream()
    block = Block(stream)
    block.draw(view_of(9))
    done = view_of(10)
    block.finish(done, was_drawn=True)
    block.hide()
    block.show()
    assert stream.screen.text.count("10 / 10") == 1
    assert "9 / 10" not in stream.screen.text


@pytest.mark.parametrize(
    ("is_terminal", "term", "expected"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)
def test_only_a_terminal_that_can_is_redrawn(
    is_terminal: bool, term: str, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", term)
    assert can_redraw(Stream(is_terminal=is_terminal)) is expected
