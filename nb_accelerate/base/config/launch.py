"""`LaunchOptions`: the arguments of one launch, checked."""

from __future__ import annotations

import inspect
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice, shown
from nb_accelerate.base.config.precision import PrecisionType
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.start_methods import START_METHODS
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PROGRESS = ("auto", "widget", "text", "off")

_CHOICES = {
    "mixed_precision": PrecisionType.list(),
    "rdzv_backend": ("static", "c10d"),
    "progress": PROGRESS,
}


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The arguments of one launch, checked. `notebook.launch.notebook_launcher` describes each of them.

    Raises:
        ConfigError: a value is wrong; the text says what was given, why it is wrong, and what to write.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=_nothing)
    num_processes: int | None = None
    mixed_precision: str = "no"
    use_port: str | int | None = None
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
    min_nodes: int | None = None
    rdzv_backend: str = "static"
    rdzv_endpoint: str = ""
    rdzv_conf: Mapping[str, Any] | None = None
    rdzv_id: str = "none"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_line_prefix_template: str | None = None
    start_method: str = "auto"
    devices: str | Sequence[int] | None = None
    timeout: float | None = None
    progress: str = "auto"
    env: Mapping[str, str] = field(default_factory=_nothing)
    by_value: Sequence[ModuleType] = ()
    fold_output: bool = False

    def __post_init__(self) -> None:
        _check_function(self.function)
        _check_args(self.args)
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ConfigError(f"kwargs={shown(self.kwargs)} does not map names to values. Write kwargs={{'lr': 0.1}}")
        _check_count("num_processes", self.num_processes, "ranks", "None for all devices")
        for name, choices in _CHOICES.items():
            object.__setattr__(self, name, check_choice(name, getattr(self, name), choices))
        object.__setattr__(self, "start_method", check_start_method(self.start_method, START_METHODS))
        _check_devices(self.devices)
        _check_port(self.use_port)
        self._check_nodes()
        if not _is_int(self.max_restarts) or self.max_restarts < 0:
            raise ConfigError(f"max_restarts={shown(self.max_restarts)} is not a number of restarts: 0, 1, 2 ...")
        _check_prefix(self.log_line_prefix_template)
        _check_env(self.env)
        for module in self.by_value:
            if not isinstance(module, ModuleType):
                raise ConfigError(f"by_value has {module!r}, which is not a module. Write by_value=[my_module]")
        _check_seconds("timeout", self.timeout, "None means no limit")
        _check_seconds("monitor_interval", self.monitor_interval, "0.1 is the default")

    def _check_nodes(self) -> None:
        _check_count("num_nodes", self.num_nodes, "machines", "1")
        _check_count("min_nodes", self.min_nodes, "machines", "None for num_nodes")
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise ConfigError(
                f"min_nodes={self.min_nodes} is more than num_nodes={self.num_nodes}, which is how many machines there "
                f"can be. Write min_nodes={self.num_nodes} or less"
            )
        if not _is_int(self.node_rank) or not 0 <= self.node_rank < self.num_nodes:
            raise ConfigError(
                f"node_rank={self.node_rank!r}, but of num_nodes={self.num_nodes} machines the first is number 0 and "
                f"the last is number {self.num_nodes - 1}"
            )
        if self.num_nodes == 1:
            return
        method = START_METHODS.get(self.start_method)
        if method is not None and method.max_nodes is not None and self.num_nodes > method.max_nodes:
            raise ConfigError(
                f"start_method={method.name!r} runs one rank in this process; num_nodes must be {method.max_nodes}"
            )
        _check_rdzv_conf(self.rdzv_conf or {})
        if self.rdzv_backend == "c10d" and not self.rdzv_endpoint:
            raise ConfigError(
                "rdzv_backend='c10d' needs an address at which machines meet. Write rdzv_endpoint='HOST:29400' with "
                "the name of one machine, the same on all machines"
            )
        if self.rdzv_backend == "static" and not self.rdzv_endpoint and self.master_addr in ("127.0.0.1", "localhost"):
            raise ConfigError(
                f"num_nodes={self.num_nodes}, but master_addr={self.master_addr!r} is the local machine on each. Write "
                f"the address of machine 0 that the others can reach: master_addr='10.0.0.1'"
            )
        if self.rdzv_backend == "static" and self.min_nodes not in (None, self.num_nodes):
            raise ConfigError(
                f"{self.min_nodes} to {self.num_nodes} machines cannot be numbered beforehand. Write "
                f"rdzv_backend='c10d', and rdzv_endpoint='HOST:29400' on all"
            )


_NUMBERS_OF_CONF = (
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
)


def _check_rdzv_conf(conf: Mapping[str, Any]) -> None:
    for name in _NUMBERS_OF_CONF:
        if name not in conf:
            continue
        try:
            float(conf[name])
        except (TypeError, ValueError):
            what = "attempts" if name == "keep_alive_max_attempt" else "seconds"
            raise ConfigError(
                f"rdzv_conf={{{name!r}: {shown(conf[name])}}} is not a number of {what}. Write "
                f"rdzv_conf={{{name!r}: 60}}, say"
            ) from None


def check_start_method(value: object, names: Iterable[str]) -> str:
    """Return a start method if it is ``"auto"`` or one of ``names``.

    Raises:
        ConfigError: there is no such start method.
    """
    return check_choice("start_method", value, ("auto", *names))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_NOT_CALLED_AT_ONCE = {
    "an async function": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "an async generator function": inspect.isasyncgenfunction,
}


def _check_function(function: object) -> None:
    if callable(function):
        for kind, has_kind in _NOT_CALLED_AT_ONCE.items():
            if has_kind(function):
                raise ConfigError(
                    f"{shown(function)} is {kind}: calling it runs nothing yet, and what it returns cannot be sent "
                    f"back. Pass a plain function: def train(...): ..."
                )
        return
    raise ConfigError(
        f"function={shown(function)} is of type {type(function).__name__} and cannot be called. Pass the function "
        f"itself, without calling it: notebook_launcher(train, args=(...,))"
    )


def _check_args(args: object) -> None:
    if isinstance(args, tuple):
        return
    if isinstance(args, list):
        whole = repr(tuple(args))
        hint = f"args={whole}" if shown(tuple(args)) == whole else "args=tuple(...)"
    else:
        one = shown(args)
        hint = f"args=({'x' if one.endswith('...') else one},): a tuple of one needs the comma"
    raise ConfigError(
        f"args={shown(args)} is of type {type(args).__name__}, but must be a tuple with one entry for each argument of "
        f"the function. Write {hint}"
    )


def _check_count(name: str, number: Any, what: str, default: str) -> None:
    if number is None:
        return
    if not _is_int(number):
        digits = isinstance(number, str) and number.strip().isdigit()
        hint = f" Write {name}={str(number).strip()}" if digits else ""
        raise ConfigError(
            f"{name}={shown(number)} is of type {type(number).__name__}, but {what} are counted with an int, or "
            f"{default}.{hint}"
        )
    if number < 1:
        raise ConfigError(f"{name}={number} starts nothing. Write {name}=1 or more, or {default}")


def _check_devices(devices: object) -> None:
    if devices is None or (isinstance(devices, str) and any(devices == kind.name for kind in DEVICE_KINDS)):
        return
    ok = isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) > 0
    if not ok or not all(_is_int(device) and device >= 0 for device in devices):  # type: ignore[attr-defined]
        raise ConfigError(f"devices={shown(devices)}: write devices='cpu', or the numbers of GPUs, as devices=[0, 2]")
    if len(set(devices)) < len(devices):  # type: ignore[call-overload, arg-type]
        raise ConfigError(f"devices={shown(devices)} names a GPU twice; each rank needs its own")


def _check_port(port: object) -> None:
    if port is None:
        return
    number = int(port) if isinstance(port, str) and port.isdigit() else port
    if not _is_int(number) or not 0 <= number < 1 << 16:  # type: ignore[operator]
        raise ConfigError(f"use_port={shown(port)} is not a port: 1 to 65535, or 0 or None for a free one")


def _check_prefix(template: object) -> None:
    if template is None:
        return
    known = ("rank", "local_rank", "role_name")
    if not isinstance(template, str):
        raise ConfigError(f"log_line_prefix_template={shown(template)} is not text. Write '[rank ${{rank}}] '")
    try:
        string.Template(template).substitute(dict.fromkeys(known, ""))
    except (KeyError, ValueError) as error:
        names = ", ".join(f"${{{name}}}" for name in known)
        raise ConfigError(f"log_line_prefix_template={template!r} may use {names}; {error} is none of them") from None


def _check_env(env: Mapping[str, object]) -> None:
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, (str, os.PathLike)):
            raise ConfigError(
                f"env has {key!r}: {value!r}, but environment variables are text. Write {str(key)!r}: '{value}'"
            )


def _check_seconds(name: str, seconds: Any, hint: str) -> None:
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{name}={shown(seconds)} is not a number of seconds above 0. {hint}")
