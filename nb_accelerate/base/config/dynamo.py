"""`TorchDynamoPlugin`: how models are compiled with `torch.compile`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_options
from nb_accelerate.base.config.distributed import Word
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.base.config.options import fields_in
from nb_accelerate.base.config.variables import DYNAMO
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class DynamoBackend(Word):
    """Backends of `torch.compile`, which turn a captured graph into code. Not all work on every machine."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    OPENXLA = "OPENXLA"
    TVM = "TVM"


# Backends of accelerate that torch_xla has under another name since its 2.1.
_RENAMED = dict.fromkeys(("aot_torchxla_trace_once", "torchxla_trace_once"), "openxla")

_BACKENDS = tuple(member.value.lower() for member in DynamoBackend)
_VARIABLES = {
    "backend": DYNAMO["dynamo_backend"],
    "mode": DYNAMO["dynamo_mode"],
    "fullgraph": DYNAMO["dynamo_use_fullgraph"],
    "dynamic": DYNAMO["dynamo_use_dynamic"],
    "use_regional_compilation": DYNAMO["dynamo_use_regional_compilation"],
}
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How ``prepare`` compiles models.

    Attributes:
        backend: the backend of `torch.compile`; None takes this and what else is not given from ``ACCELERATE_DYNAMO_*``
            variables. Without these models are not compiled.
        mode: what to optimise for: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or
            ``"max-autotune-no-cudagraphs"``.
        fullgraph: refuse models that cannot be captured as one graph.
        dynamic: compile for tensors whose shapes vary; None lets torch find out.
        options: arguments of the backend, in place of ``mode``.
        disable: capture nothing, for testing.
        use_regional_compilation: compile the repeated blocks of a model by themselves, which takes less time than
            the whole model and runs nearly as fast.

    Raises:
        ConfigError: a value is of the wrong type, or not a choice.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    _checks: ClassVar[dict[str, Any]] = {
        "backend": lambda name, value: DynamoBackend(check_choice(f"dynamo_{name}", value, _BACKENDS).upper()),
        "mode": partial(check_choice, choices=_MODES),
    }

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is None:
            self._complete(Environment())

    def _complete(self, environment: Environment) -> None:
        """Take what was not given from the environment, if a backend is named there."""
        if environment.text(_VARIABLES["backend"]) is None:
            return
        values = fields_in(environment, self, _VARIABLES)
        if self.options is not None:
            values.pop("mode", None)
        for field, value in values.items():
            setattr(self, field, value)

    @override
    def to_kwargs(self) -> dict[str, Any]:
        values = {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}
        return values | ({"backend": str(self.backend).lower()} if "backend" in values else {})

    @property
    def is_on(self) -> bool:
        """Whether models are compiled."""
        return self.backend not in {None, DynamoBackend.NO}

    def to_compile(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that differ from their defaults."""
        arguments = self.to_kwargs()
        arguments.pop("use_regional_compilation", None)
        name = str(self.backend).lower()
        return arguments | {"backend": _RENAMED.get(name, name)}


def resolve_dynamo(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None, environment: Environment
) -> TorchDynamoPlugin:
    """Choose how models are compiled: argument or plugin, else the environment, else not at all.

    A plugin without a backend is completed from the environment and returned itself, so that its fields can be set
    until a model is prepared.
    """
    if backend is not None and plugin is not None:
        raise ConfigError(
            "dynamo_backend and dynamo_plugin were both given. Write TorchDynamoPlugin(backend=...) and leave "
            "dynamo_backend out."
        )
    chosen = check_options("dynamo_plugin", plugin, TorchDynamoPlugin) or TorchDynamoPlugin(backend=backend)
    if chosen.backend is None:
        chosen._complete(environment)  # noqa: SLF001 - it may name other variables than those of this process
        chosen.backend = chosen.backend or DynamoBackend.NO
    return chosen
