"""`nb-accelerate completion`: a script that completes commands and options in a shell.

It is made from the parsers themselves, so it has every option that ``--help`` has.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(kw_only=True)
class Command:
    """What can follow a command.

    Attributes:
        words: the command, ``"config update"`` say; ``""`` for the program itself.
        help: a sentence about it.
        options: options by their spellings, with a sentence about each.
        choices: the values of those options that take one of a few.
        commands: the names of its subcommands.
        arguments: what its positional argument can be, if that is one of a few.
    """

    words: str
    help: str = ""
    options: dict[tuple[str, ...], str] = field(default_factory=dict)
    choices: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `completion` to the command line."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description='Print a script that completes commands and options. For bash, write eval "$(nb-accelerate '
        'completion bash)" in ~/.bashrc; for zsh, the same with zsh in ~/.zshrc, after compinit; for fish, save it as '
        "~/.config/fish/completions/nb-accelerate.fish.",
    )
    parser.add_argument("shell", choices=sorted(_SCRIPTS), help="the shell to complete in")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    print(_SCRIPTS[arguments.shell](list(commands_of(arguments.program))))
    return 0


def commands_of(parser: argparse.ArgumentParser, words: str = "", help: str = "") -> Iterator[Command]:  # noqa: A002
    """Yield the command of a parser, and those inside it. Hidden options are left out."""
    found = Command(words=words, help=help)
    inside: list[Command] = []
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to ask
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            sentences = {choice.dest: choice.help or "" for choice in action._choices_actions}  # noqa: SLF001
            found.commands = tuple(sentences)
            for name, sentence in sentences.items():
                inside += commands_of(action.choices[name], f"{words} {name}".strip(), sentence)
        elif action.help != argparse.SUPPRESS and action.option_strings:
            spellings = tuple(action.option_strings)
            found.options[spellings] = (action.help or "").replace("%%", "%")
            if action.choices and not any(" " in one for one in action.choices):  # words are what shells complete
                found.choices[spellings] = tuple(action.choices)
        elif action.choices:
            found.arguments = tuple(action.choices)
    yield found
    yield from inside


def _bash(commands: list[Command]) -> str:
    known = "|".join(shlex.quote(command.words) for command in commands if command.words)
    words: list[tuple[str, Iterable[str]]] = []
    values: list[tuple[str, Iterable[str]]] = []
    for command in commands:
        if command.commands or command.arguments:
            words.append((shlex.quote(f"{command.words} "), (*command.commands, *command.arguments)))
        words.append((shlex.quote(f"{command.words} -"), itertools.chain(*command.options)))
        for spellings, choices in command.choices.items():
            values.append(("|".join(shlex.quote(f"{command.words} {one}") for one in spellings), choices))
    return _BASH.format(known=known, values=_cases(values), words=_cases(words))


def _cases(found: Iterable[tuple[str, Iterable[str]]]) -> str:
    return "\n".join(f"        {pattern}) words={shlex.quote(' '.join(words))};;" for pattern, words in found)


_BASH = """\
_nb_accelerate() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command="" words="" kind="" i
    [[ $current == -* ]] && kind=-
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${{command:+$command }}${{COMP_WORDS[i]}}" in
        {known}) command="${{command:+$command }}${{COMP_WORDS[i]}}";;
        esac
    done
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
        *) case "$command $kind" in
{words}
        esac;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _nb_accelerate nb-accelerate"""


def _zsh(commands: list[Command]) -> str:
    # A shell whose .zshrc does not start completion lacks compdef; -i leaves files out that others could have changed.
    start = "whence compdef >/dev/null || { autoload -Uz compinit && compinit -i; }"
    return f"{start}\nautoload -Uz bashcompinit && bashcompinit\n{_bash(commands)}"


def _fish(commands: list[Command]) -> str:
    program, *others = commands
    nothing_yet = f"not __fish_seen_subcommand_from {' '.join(program.commands)}"
    lines: list[tuple[str, ...]] = []
    for command in (program, *others):
        seen = [f"__fish_seen_subcommand_from {word}" for word in command.words.split()]
        if seen:
            name = command.words.split()[-1]
            lines.append((seen[0] if len(seen) > 1 else nothing_yet, "-f", "-a", name, "-d", command.help))
        if command.arguments:
            lines.append(("; and ".join(seen) or nothing_yet, "-f", "-a", " ".join(command.arguments)))
        for spellings, sentence in command.options.items():
            flags: list[str] = []
            for one in spellings:
                flags += ("-l", one.removeprefix("--")) if one.startswith("--") else ("-s", one.removeprefix("-"))
            values = command.choices.get(spellings)
            given = ("-x", "-a", " ".join(values)) if values else ()
            lines.append(("; and ".join(seen) or nothing_yet, *flags, *given, "-d", sentence))
    return "\n".join(shlex.join(("complete", "-c", "nb-accelerate", "-n", *line)) for line in lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
