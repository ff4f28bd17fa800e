"""Ask questions in a terminal: with arrow keys in an interactive one, line by line where input is piped in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, TypeVar

from typing_extensions import override

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Asker(Protocol):
    """Ask the user questions."""

    def choose(self, question: str, options: Sequence[tuple[str, str]], default: str) -> str:
        """Return the value of one of ``options``, which are pairs of a value and a label."""
        ...

    def line(self, question: str, default: str) -> str:
        """Return the line that was typed, without surrounding spaces; "" if it is empty. The default is only shown."""
        ...

    def say(self, text: str) -> None:
        """Show a line."""
        ...


def asker_here() -> Asker:
    """Return `ArrowKeys` in an interactive terminal, else `PlainLines`."""
    return ArrowKeys() if sys.stdin.isatty() and sys.stdout.isatty() else PlainLines()


def confirm(asker: Asker, question: str, *, default: bool) -> bool:
    """Ask for a yes or no."""
    options = [("yes", "yes"), ("no", "no")]
    return asker.choose(question, options, "yes" if default else "no") == "yes"


def read_value(asker: Asker, question: str, default: T, convert: Callable[[str], T]) -> T:
    """Ask until the answer can be converted.

    Args:
        default: the value of an empty answer; "" if there is none, and then ``convert`` gets the empty answer.
        convert: makes a value of text; raises ValueError where it cannot.
    """
    while True:
        answer = asker.line(question, str(default))
        if not answer and default != "":
            return default
        try:
            return convert(answer)
        except ValueError as error:
            asker.say(f"  {error}")


class ArrowKeys(Asker):
    """Ask questions that are answered with arrow keys and Return."""

    @override
    def choose(self, question: str, options: Sequence[tuple[str, str]], default: str) -> str:
        from prompt_toolkit.shortcuts import choice

        return choice(question, options=options, default=default)

    @override
    def line(self, question: str, default: str) -> str:
        from prompt_toolkit import prompt

        try:
            return prompt(_with_default(question, default)).strip()
        except EOFError:  # Ctrl-D
            raise KeyboardInterrupt from None

    @override
    def say(self, text: str) -> None:
        print(text)


class PlainLines(Asker):
    """Ask questions that are answered by a line of standard input: the number of an option, or its value."""

    @override
    def choose(self, question: str, options: Sequence[tuple[str, str]], default: str) -> str:
        values = [value for value, _ in options]
        print(question)
        for number, (value, name) in enumerate(options, start=1):
            print(f"  {number}. {name}{' (default)' if value == default else ''}")
        while True:
            answer = _read("> ")
            if not answer:
                return default
            if answer.isdecimal() and 1 <= int(answer) <= len(values):
                return values[int(answer) - 1]
            meant = [value for value, name in options if answer.lower() in (value.lower(), name.lower())]
            # "y" and "n" are what people type for a yes or no.
            meant = meant or [value for value in values if value in ("yes", "no") and answer.lower() == value[0]]
            if meant:
                return meant[0]
            print(f"  {answer!r} is none of them. Write a number from 1 to {len(values)}, or nothing for the default.")

    @override
    def line(self, question: str, default: str) -> str:
        return _read(f"{_with_default(question, default)}")

    @override
    def say(self, text: str) -> None:
        print(text)


def _read(prompt: str) -> str:
    try:
        answer = input(prompt).strip()
    except EOFError:
        print()
        raise ConfigError(
            "the input ended before the last question; nothing was written. "
            "For a file without questions: nb-accelerate config default"
        ) from None
    if not sys.stdin.isatty():
        print(answer)  # nobody has typed it, and without it the questions would run together
    return answer


def _with_default(question: str, default: str) -> str:
    return f"{question} [{default}]: " if default else f"{question}: "
