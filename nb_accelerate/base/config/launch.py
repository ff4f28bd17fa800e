"""`LaunchOptions`: the arguments of one launch, checked."""

from __future__ import annotations

import inspect
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice, check_number, check_whole, described, shown
from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.engine import LOCAL
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.start_methods import START_METHODS
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nb_accelerate.base.config.engine import EngineOptions

PROGRESS = ("auto", "widget", "text", "off")

_CHOICES = {
    "mixed_precision": PrecisionType.list(),
    "rdzv_backend": ("static", "c10d"),
    "progress": PROGRESS,
}


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The arguments of one launch, checked. `notebook.launch.notebook_launcher` describes each of them.

    Raises:
        ConfigError: a value is wrong; the text says what was given, why it is wrong, and what to write.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_processes: int | None = None
    mixed_precision: str = "no"
    use_port: str | int | None = None
    master_addr: str = "127.0.0.1"
    node_rank: int = 0
    num_nodes: int = 1
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
    env: Mapping[str, str] = field(default_factory=dict)
    by_value: Sequence[ModuleType] = ()
    fold_output: bool = False
    engine: EngineOptions = LOCAL

    def __post_init__(self) -> None:
        self._check_function()
        if not isinstance(self.args, tuple):
            hint = "tuple(...)" if isinstance(self.args, list) else f"({shown(self.args)},)"
            raise ConfigError(
                f"args={shown(self.args)} is {described(self.args)}, but must be a tuple with one entry for each "
                f"argument of the function. Write args={hint}"
            )
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ConfigError(f"kwargs={shown(self.kwargs)} does not map names to values. Write kwargs={{'lr': 0.1}}")
        for name, choices in _CHOICES.items():
            object.__setattr__(self, name, check_choice(name, getattr(self, name), choices))
        object.__setattr__(self, "start_method", check_start_method(self.start_method, START_METHODS))
        for name, least in (("num_processes", 1), ("num_nodes", 1), ("max_restarts", 0)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), at_least=least)
        for name in ("timeout", "monitor_interval"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        _check_devices(self.devices)
        port = int(self.use_port) if isinstance(self.use_port, str) and self.use_port.isdigit() else self.use_port
        if port is not None and (type(port) is not int or not 0 <= port < 1 << 16):
            what = "is not a port: 1 to 65535, or 0 or None for a free one"
            raise ConfigError(f"use_port={shown(port)} {what}", options=("use_port",))
        self._check_nodes()
        try:
            string.Template(self.log_line_prefix_template or "").substitute(rank="", local_rank="", role_name="")
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"log_line_prefix_template={self.log_line_prefix_template!r} is not text in which only ${{rank}}, "
                f"${{local_rank}} and ${{role_name}} are filled in: {error}"
            ) from None
        for key, value in self.env.items():
            if not isinstance(key, str) or not isinstance(value, (str, os.PathLike)):
                raise ConfigError(
                    f"env has {key!r}: {value!r}, but environment variables are text. Write {str(key)!r}: '{value}'"
                )
        for module in self.by_value:
            if not isinstance(module, ModuleType):
                raise ConfigError(f"by_value has {module!r}, which is not a module. Write by_value=[my_module]")

    def _check_function(self) -> None:
        function = self.function
        if not callable(function):
            raise ConfigError(
                f"function={shown(function)} is {described(function)} and cannot be called. Pass the function itself, "
                "without calling it: notebook_launcher(train, args=(...,))"
            )
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if is_async or inspect.isgeneratorfunction(function):
            raise ConfigError(
                f"{shown(function)} is {'an async' if is_async else 'a generator'} function: calling it runs nothing "
                "yet, and what it returns cannot be sent back. Pass a plain function: def train(...): ..."
            )

    def _check_nodes(self) -> None:
        if check_whole("node_rank", self.node_rank, at_least=0) >= self.num_nodes:
            raise ConfigError(
                f"node_rank={self.node_rank}, but of num_nodes={self.num_nodes} machines the first is number 0 and "
                f"the last is number {self.num_nodes - 1}",
                options=("num_nodes", "node_rank"),
            )
        method = START_METHODS.get(self.start_method)
        if not self.engine.is_local and self.num_nodes > 1:
            raise ConfigError(
                f"num_nodes={self.num_nodes} is for the same cell in a notebook on each machine. With engine="
                f"{self.engine.engine!r} one notebook has all ranks: leave num_nodes out"
            )
        if not self.engine.is_local and method is not None and not method.serves_cells:
            raise ConfigError(
                f"start_method={method.name!r} needs the memory of this notebook, which other machines do not have. "
                "Leave start_method out"
            )
        if self.num_nodes == 1:
            return
        if method is not None and method.max_nodes is not None and self.num_nodes > method.max_nodes:
            raise ConfigError(
                f"start_method={method.name!r} runs one rank in this process; num_nodes must be {method.max_nodes}",
                options=("num_nodes",),
            )
        if self.rdzv_backend == "c10d" and not self.rdzv_endpoint:
            raise ConfigError(
                "rdzv_backend='c10d' needs an address at which machines meet. Write rdzv_endpoint='HOST:29400' "
                "with the name of one machine, the same on all machines",
                options=("rdzv_endpoint",),
            )
        if not self.rdzv_endpoint and self.master_addr in ("127.0.0.1", "localhost"):
            raise ConfigError(
                f"num_nodes={self.num_nodes}, but master_addr={self.master_addr!r} is the local machine on each. Write "
                f"the address of machine 0 that the others can reach: master_addr='10.0.0.1'",
                options=("num_nodes", "master_addr"),
            )


def check_start_method(value: object, names: Iterable[str]) -> str:
    """Return a start method if it is ``"auto"`` or one of ``names``."""
    return check_choice("start_method", value, ("auto", *names))


def _check_devices(devices: Any) -> None:
    if devices is None or any(devices == kind.name for kind in DEVICE_KINDS):
        return
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) > 0
    if not is_list or not all(type(device) is int and device >= 0 for device in devices):
        what = "write devices='cpu', or the numbers of GPUs, as devices=[0, 2]"
        raise ConfigError(f"devices={shown(devices)}: {what}", options=("devices",))
    if len(set(devices)) < len(devices):
        raise ConfigError(f"devices={shown(devices)} names a GPU twice; each rank needs its own", options=("devices",))
