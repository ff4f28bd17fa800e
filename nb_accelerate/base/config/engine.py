"""`EngineOptions`: on which machines a launch has its ranks, and who places them there. Checked."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice, described, shown
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# ``user@a:8``, ``a`` or ``[fd00::1]:8``. A name that begins with - would be an option of a command.
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[^\s:\[\]-][^\s:\[\]]*)(?::(?P<ranks>[0-9]+))?")


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """An engine: who starts one host process on each machine."""

    opens: str  # ``module:Class`` of an `Engine`, called with `EngineOptions`. It belongs to the notebook half.
    needs: tuple[str, ...] = ()  # options that have to be given
    takes: tuple[str, ...] = ()  # options that can be given too


_ENGINES = "nb_accelerate.notebook.launch.engines"

# By name. ``"auto"`` is none of them: ranks are on this machine.
ENGINES: dict[str, EngineRow] = {
    "ssh": EngineRow(opens=f"{_ENGINES}.command:SshEngine", needs=("hosts",), takes=("remote_python",)),
    "command": EngineRow(
        opens=f"{_ENGINES}.command:CommandEngine", needs=("hosts", "command_template"), takes=("remote_python",)
    ),
    "ray": EngineRow(opens=f"{_ENGINES}.ray:RayEngine", takes=("hosts", "address")),
}

# ``srun`` without ``-u``, which buffers output until a line ends.
_BUFFERS_LINES = re.compile(r"(?:^|[\s/'\"])srun(?=\s)(?!.*\s(?:-\w*u|--unb))", re.DOTALL)

# What to write for an option that is missing.
EXAMPLES = {"hosts": '["a:8", "b:8"]', "command_template": '"docker exec -i {host} {command}"'}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """On which machines ranks are, and who places them there. `notebook_launcher` describes each option.

    Attributes:
        hosts: names of machines, each with a number of ranks behind a colon where that is given.

    Raises:
        ConfigError: an option has a value that cannot be, or one that its engine does not take.
    """

    engine: str = "auto"
    hosts: Sequence[str] = ()
    address: str | None = None
    command_template: str | None = None
    remote_python: str = "python3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "engine", check_choice("engine", self.engine, ("auto", *ENGINES)))
        object.__setattr__(self, "hosts", _checked_hosts(self.hosts))
        self._check_taken()
        for name in ("command_template", "remote_python"):
            try:
                shlex.split(getattr(self, name) or "")
            except ValueError as error:
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} cannot be read as a command: {error}. Close the quotes"
                ) from None
        if not self.remote_python.strip():
            raise ConfigError("remote_python='' names no interpreter. Write remote_python='python3'")
        if self.command_template is not None and "{command}" not in self.command_template:
            raise ConfigError(
                f"command_template={shown(self.command_template)} has no {{command}}, which is what runs on the "
                f"machine. Write command_template={EXAMPLES['command_template']}"
            )
        if _BUFFERS_LINES.search(self.command_template or ""):
            raise ConfigError(
                f"command_template={shown(self.command_template)} has srun without -u, which buffers output until "
                "a line ends, and most of what a machine sends has no line end. Write srun -u"
            )

    @classmethod
    def chosen(cls, settings: Mapping[str, Any], **given: Any) -> EngineOptions:
        """Return options, some given by a call and the rest by ``settings``.

        Args:
            said: elsewhere, for all calls. What the engine of this one does not take is not used.
            given: by name; None for what is not given.
        """
        options = {name: value for name, value in given.items() if value is not None}
        engine = options.setdefault("engine", settings.get("engine", "auto"))
        row = ENGINES.get(str(engine).lower(), EngineRow(opens=""))
        return cls(**{name: settings[name] for name in (*row.needs, *row.takes) if name in settings} | options)

    @property
    def is_local(self) -> bool:
        """Whether ranks are on this machine, without an engine."""
        return self.engine == "auto"

    @property
    def python(self) -> list[str]:
        """The command that starts Python on a machine, in words: it may be ``nice python3``."""
        return shlex.split(self.remote_python)

    @property
    def machines(self) -> list[tuple[str, int | None]]:
        """Name and number of ranks of each machine; None where `hosts` has no number."""
        return [split_host(host) for host in self.hosts]

    def _check_taken(self) -> None:
        row = ENGINES.get(self.engine, EngineRow(opens=""))
        defaults = {field.name: field.default for field in fields(self)}
        for name in (name for name in VARIABLES if name != "engine"):
            is_given = getattr(self, name) != defaults[name]
            if name in row.needs and not is_given:
                raise ConfigError(
                    f"engine={self.engine!r} needs {name}. Write {name}={EXAMPLES[name]}, or set {VARIABLES[name]}"
                )
            if is_given and name not in (*row.needs, *row.takes):
                takers = [other for other, taker in ENGINES.items() if name in (*taker.needs, *taker.takes)]
                instead = f"Write engine={takers[0]!r}, or leave {name} out" if takers else f"Leave {name} out"
                here = ", by which ranks are on this machine" if self.is_local else ""
                raise ConfigError(
                    f"{name}={shown(getattr(self, name))} is not for engine={self.engine!r}{here}. {instead}"
                )


def split_host(host: str) -> tuple[str, int | None]:
    """Return the name of a machine and its number of ranks, of ``user@a:8``, ``a`` or ``[fd00::1]:8``."""
    match = _HOST.fullmatch(host)
    if match is None or match["ranks"] == "0":
        raise ConfigError(
            f"hosts has {host!r}, which is not the name of a machine with a number of ranks. Write 'a:8' or 'me@a:8', "
            "and a port of ssh into ~/.ssh/config"
        )
    return match["name"].strip("[]"), int(match["ranks"]) if match["ranks"] else None


def _checked_hosts(hosts: Any) -> tuple[str, ...]:
    """Return the hosts as they were written, each a word; of text, those between commas."""
    if isinstance(hosts, str):
        hosts = [host for host in re.split(r"[\s,]+", hosts) if host]
    if not isinstance(hosts, (list, tuple)) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(
            f"hosts={shown(hosts)} is {described(hosts)}, not a list of names. Write hosts=['a:8', 'b:8']"
        )
    names = [split_host(host)[0] for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"hosts={shown(hosts)} names {twice!r} twice. Write it once, with all its ranks: '{twice}:8'")
    return tuple(hosts)


# Environment variables by option: what is said for all calls of a process.
VARIABLES = {field.name: f"NB_ACCELERATE_{field.name.upper()}" for field in fields(EngineOptions)}

LOCAL = EngineOptions()  # ranks are on this machine
