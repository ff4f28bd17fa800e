"""The screen and the terminal that tests look at."""

from __future__ import annotations

import os
import sys

import pytest
from fixtures.screens import Screen, Terminal


def test_a_screen_shows_what_a_terminal_would():
    screen = Screen(columns=8)
    screen.feed("one\r\ntwo\nthree\n")
    assert screen.lines == ["one", "two", "three", ""]
    screen.feed("\x1b[2F\x1b[JT\x1b[31mW\x1b[0mO\n")
    assert screen.lines == ["one", "TWO", ""]
    screen.feed("12345\rab\n")
    assert screen.lines == ["one", "TWO", "ab345", ""]
    screen.feed("123456789\n")
    assert screen.lines[3:] == ["12345678", "9", ""]


@pytest.mark.parametrize("text", ["\x1b[2X", "\x1b]0;title\x07", "a\x1b"])
def test_a_screen_says_what_it_does_not_know(text: str):
    with pytest.raises(AssertionError, match="unknown escape sequence"):
        Screen().feed(text)


PROGRAM = """
import os, sys, time
print(os.isatty(0), os.isatty(1), os.get_terminal_size(), flush=True)
try:
    for byte in "\u2501\x1b[31m".encode():
        os.write(1, bytes([byte]))
    print(flush=True)
    while True:  # one long wait may begin just after the signal has come, and never hear of it
        time.sleep(0.1)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_a_program_in_a_terminal_sees_one_and_is_interrupted_by_its_keys():
    terminal = Terminal([sys.executable, "-c", PROGRAM], dict(os.environ), columns=70, rows=20)
    try:
        terminal.wait_for(lambda text: text.endswith("\u2501\n"))
        assert terminal.screen.lines[0] == "True True os.terminal_size(columns=70, lines=20)"
        terminal.press("\x03")
        assert terminal.finish() == 7
    finally:
        terminal.close()
