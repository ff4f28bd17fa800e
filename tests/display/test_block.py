"""The panel in a terminal, drawn over itself."""

from __future__ import annotations

import io

import pytest

from nb_accelerate.display.block import Block, can_redraw
from nb_accelerate.display.view import Facts, Row, View


class Screen(io.StringIO):
    """What a terminal shows, as far as a block uses it: lines, going up some of them, and wiping what follows."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str, /) -> int:
        while text:
            if text.startswith("\x1b["):
                up, _, rest = text[2:].partition("F\x1b[J")
                del self.lines[len(self.lines) - 1 - int(up) :]
                self.lines.append("")
                text = rest
                continue
            plain, escape, rest = text.partition("\x1b")
            head, *more = plain.split("\n")
            self.lines[-1] += head
            self.lines += more
            text = escape + rest
        return 0


def view_of(step: int, name: str = "train") -> View:
    row = Row(ranks="0", share=step / 10, step=f"{step} / 10", now="forward")
    return View(state="running", facts=Facts(name=name, setup=("1 rank",)), elapsed="0:01", rows=(row,))


def test_a_new_drawing_takes_the_place_of_the_last():
    screen = Screen()
    block = Block(screen)
    block.draw(view_of(1))
    height = len(screen.lines)
    block.draw(view_of(2))
    assert len(screen.lines) == height
    assert "2 / 10" in "\n".join(screen.lines)
    assert "1 / 10" not in "\n".join(screen.lines)


def test_what_is_printed_stands_above_the_block():
    screen = Screen()
    block = Block(screen)
    block.draw(view_of(1))
    block.hide()
    screen.write("epoch 1 done\n")
    block.show()
    assert screen.lines[0] == "epoch 1 done"
    assert "1 / 10" in "\n".join(screen.lines[1:])


def test_a_line_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "24")
    screen = Screen()
    Block(screen).draw(view_of(1, name="a_function_with_a_name_that_takes_some_room"))
    assert max(map(len, screen.lines)) < 30


def test_at_the_end_the_block_is_a_table_that_stays():
    screen = Screen()
    block = Block(screen)
    block.draw(view_of(9))
    done = view_of(10)
    block.finish(done, was_drawn=True)
    block.hide()
    block.show()
    assert "\n".join(screen.lines).count("10 / 10") == 1
    assert "9 / 10" not in "\n".join(screen.lines)


@pytest.mark.parametrize(
    ("is_terminal", "term", "expected"), [(True, "xterm", True), (True, "dumb", False), (False, "xterm", False)]
)
def test_only_a_terminal_that_can_is_redrawn(
    is_terminal: bool, term: str, expected: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", term)
    assert can_redraw(Screen(is_terminal=is_terminal)) is expected
