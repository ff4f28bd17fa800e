"""Ask questions that are answered by a line of standard input: typed in a terminal, or piped in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Asker:
    """Asks the user questions."""

    def choose(self, question: str, options: Sequence[tuple[str, str]], default: str) -> str:
        """Return the value of one of ``options``, pairs of a value and a label: its number, value or label is typed."""
        self.say(question)
        for number, (value, label) in enumerate(options, start=1):
            self.say(f"  {number}. {label}{' (default)' if value == default else ''}")
        while True:
            answer = _read("> ").lower()
            if not answer:
                return default
            for number, (value, label) in enumerate(options, start=1):
                # "y" and "n" are what people type for a yes or no.
                if answer in (str(number), value.lower(), label.lower(), value[0] if value in ("yes", "no") else None):
                    return value
            self.say(
                f"  {answer!r} is none of them. Write a number from 1 to {len(options)}, or nothing for the default."
            )

    def line(self, question: str, default: str = "") -> str:
        """Return the line that was typed, without surrounding spaces; "" if it is empty. The default is only shown."""
        return _read(f"{question} [{default}]: " if default else f"{question}: ")

    def say(self, text: str) -> None:
        """Show a line."""
        print(text)

    def confirm(self, question: str, *, default: bool = False) -> bool:
        """Ask for a yes or no."""
        return self.choose(question, [("yes", "yes"), ("no", "no")], "yes" if default else "no") == "yes"

    def value(self, question: str, default: T, convert: Callable[[str], T]) -> T:
        """Ask until the answer can be converted.

        Args:
            default: the value of an empty answer; "" if there is none, and then ``convert`` gets the empty answer.
            convert: makes a value of text; raises ValueError where it cannot.
        """
        while True:
            answer = self.line(question, str(default))
            if not answer and default != "":
                return default
            try:
                return convert(answer)
            except ValueError as error:
                self.say(f"  {error}")

    def number(self, question: str, default: int, *, at_least: int = 1, below: int | None = None) -> int:
        """Ask for a whole number."""
        return self.value(question, default, lambda text: whole_number(text, at_least=at_least, below=below))


def whole_number(text: str, *, at_least: int = 1, below: int | None = None) -> int:
    """Return the number that a text says."""
    if not text.isdecimal() or int(text) < at_least or (below is not None and int(text) >= below):
        bounds = f"from {at_least}" + (f" to {below - 1}" if below is not None else "")
        raise ValueError(f"{text!r} is not a whole number {bounds}.")
    return int(text)


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
