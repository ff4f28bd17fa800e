"""The cell magic ``%%distribute``: show what makes a plain training loop a distributed one, and put it in its place."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from nb_accelerate.magics import args
from nb_accelerate.magics.args import HELP, Option
from nb_accelerate.magics.loop_rewriting import rewrite
from nb_accelerate.magics.plain import plain_errors

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

REWRITING = (
    Option(
        ("--launch",),
        "launch",
        "Also put the loop in a function, and launch it on all devices, or on num_processes.",
    ),
    Option(("--accept",), "accept", "Replace the cell without asking."),
)
"""Options of ``%%distribute``."""

HELP_TEXT = args.help_text(
    "%%distribute [--launch] [--accept]",
    "Show the changes that make the plain PyTorch loop of this cell one with an Accelerator, ask, and replace it.\n"
    "The cell is not run. A loop that is not wholly understood is left alone, with the line and the reason.",
    (*REWRITING, HELP),
)


class Distribute:
    """The cell magic.

    Args:
        shell: of the kernel.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell

    def run(self, line: str, cell: str) -> None:
        """Rewrite the cell; replaced below by the whole help."""
        with plain_errors():
            parsed = args.parse(line, (*REWRITING, HELP), usage="%%distribute alone, and the loop below")
            if parsed.get("help"):
                _say(HELP_TEXT)
                return
            # An empty line in the place of the magic's: lines are counted as the notebook shows them.
            new = rewrite(f"\n{cell}", launch=bool(parsed.get("launch")))
            text = new.text.removeprefix("\n").rstrip("\n")
        magic = f"%%distribute {line}".strip()
        changes = _changes([magic, *cell.splitlines()], text.splitlines(), with_indent=not parsed.get("launch"))
        hint = ("notebook_launcher(train) takes all devices; write num_processes=2 in it for two processes",)
        _say("\n".join([*changes, *new.notes, *(hint if parsed.get("launch") else ())]))
        if not parsed.get("accept") and not _is_accepted():
            _say("nothing was changed. To replace the cell without a question: %%distribute --accept")
            return
        self._shell.set_next_input(text, replace=True)
        ranks = "" if parsed.get("launch") else ": alone on one process, or with %%distributed -n 2 above it on two"
        _say(f"the cell is replaced; run it{ranks}")

    run.__doc__ = HELP_TEXT


def _changes(old: list[str], new: list[str], *, with_indent: bool) -> list[str]:
    """Return a unified diff; without indentation, lines that are only indented differently count as alike."""
    before, after = (lines if with_indent else [one.strip() for one in lines] for lines in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    shown = ["--- this cell", "+++ distributed"]
    for group in matcher.get_grouped_opcodes():
        (_, first, _, new_first, _), (_, _, last, _, new_last) = group[0], group[-1]
        shown.append(f"@@ -{first + 1},{last - first} +{new_first + 1},{new_last - new_first} @@")
        for tag, begin, end, new_begin, new_end in group:
            if tag == "equal":
                shown += [f" {line}" for line in new[new_begin:new_end]]
            else:
                shown += [f"-{line}" for line in old[begin:end]] + [f"+{line}" for line in new[new_begin:new_end]]
    return shown


def _is_accepted() -> bool:
    try:
        reply = input("Replace this cell? [y/N] ")
    except (EOFError, NotImplementedError):  # nobody is there, or IPython's StdinNotImplementedError
        return False
    return reply.strip().lower() in ("y", "yes")


def _say(text: str) -> None:
    print(text)  # noqa: T201 - it was asked for
