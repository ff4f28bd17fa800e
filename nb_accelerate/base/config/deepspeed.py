"""How models are trained with DeepSpeed."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_number, check_options, check_whole
from nb_accelerate.base.config.deepspeed_json import AUTO, HfDeepSpeedConfig, contradictions, filled
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.base.config.options import fields_in
from nb_accelerate.base.config.variables import DEEPSPEED, USES
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from nb_accelerate.base.config.env import Environment

# Fields of `DeepSpeedPlugin` by the keys that say the same in a DeepSpeed configuration.
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}

_DEFAULT = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_optimization": {},
}

_DEVICES = ("none", "cpu", "nvme")

# Fields whose variables count with all engines, or may be ``"auto"``.
_READ_APART = ("gradient_accumulation_steps", "gradient_clipping")

_VARIABLES = {field: name for field, name in DEEPSPEED.items() if field not in _READ_APART}
_VARIABLES["transformer_moe_cls_names"] = DEEPSPEED["deepspeed_moe_layer_cls_names"]


@dataclass
class DeepSpeedPlugin(KwargsHandler):
    """Train with DeepSpeed: ``Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))``. Names are accelerate's.

    What is None is taken from ``hf_ds_config``, else from ``ACCELERATE_DEEPSPEED_*`` variables, else it has the
    default that is named here. Contradictions between fields and ``hf_ds_config`` are refused.

    Attributes:
        hf_ds_config: DeepSpeed's own configuration: the path of a JSON file, a dict, or a `HfDeepSpeedConfig`. Its
            values may be ``"auto"``; they are filled in when a model is prepared.
        gradient_accumulation_steps: batches for one optimizer step. Default: as the `Accelerator` says.
        gradient_clipping: the greatest norm of gradients. Default: the norm given to ``clip_grad_norm_``, else none.
        zero_stage: 0 shards nothing, 1 shards optimizer state over ranks, 2 gradients too, 3 parameters too.
            Default: 2.
        is_train_batch_min: of loaders that are prepared with a model, the smallest batch size counts; else the
            greatest.
        offload_optimizer_device: where optimizer state is kept: ``"none"`` (the default) is the device of the model,
            ``"cpu"`` host memory (stages 1 to 3), ``"nvme"`` a disk (stage 3).
        offload_param_device: where parameters are kept; stage 3 only.
        offload_optimizer_nvme_path: folder for optimizer state on a disk.
        offload_param_nvme_path: folder for parameters on a disk.
        zero3_init_flag: make models of transformers sharded from the first, with ``from_pretrained``. It counts in
            stage 3, where it is the default.
        zero3_save_16bit_model: let ``engine.save_16bit_model`` gather the weights of stage 3. Default: True.
        transformer_moe_cls_names: classes of mixture-of-experts layers that stage 3 is to gather whole, separated by
            commas.
        enable_msamp: not supported.
        msamp_opt_level: not supported.

    Raises:
        ConfigError: a value is not supported, of the wrong type, or contradicts another one.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    selected: bool = field(default=False, init=False, repr=False, compare=False)

    _checks: ClassVar[dict[str, Any]] = {
        "hf_ds_config": lambda _, value: value if isinstance(value, HfDeepSpeedConfig) else HfDeepSpeedConfig(value),
        "gradient_accumulation_steps": partial(check_whole, at_least=1),
        "gradient_clipping": partial(check_number, above=0),
        "zero_stage": lambda name, value: int(check_choice(name, value, ("0", "1", "2", "3"))),
        "offload_optimizer_device": partial(check_choice, choices=_DEVICES),
        "offload_param_device": partial(check_choice, choices=_DEVICES),
    }

    @override
    def _check(self) -> None:
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            if getattr(self, name) == AUTO:
                self._set(name, None)
        if self.hf_ds_config in (None, "none"):  # the word of accelerate
            self._set("hf_ds_config", _DEFAULT)
        super()._check()
        if self.enable_msamp:
            raise ConfigError(
                "enable_msamp=True was given, but MS-AMP is not supported. Leave it out, and write "
                "mixed_precision='bf16'."
            )
        self._merge()

    def _merge(self) -> None:
        """Put fields into the configuration, and what only the configuration says into fields."""
        config = self.hf_ds_config.config
        fields = {key: getattr(self, name) for name, key in _KEYS.items() if getattr(self, name) is not None}
        # What this plugin has put there itself may be changed.
        own_keys: set[str] = set(getattr(self, "_own_keys", ()))
        problems = contradictions(config, {key: value for key, value in fields.items() if key not in own_keys})
        if problems:
            raise ConfigError(
                f"DeepSpeedPlugin and its configuration contradict each other: {'; '.join(problems)}. Write each in "
                'one of the two places only, or "auto" in the configuration.'
            )
        for key, value in fields.items():
            *sections, last = key.split(".")
            node = config
            for section in sections:
                node = node.setdefault(section, {})
            if node.get(last) in {None, AUTO} or key in own_keys:
                node[last] = value
                own_keys.add(key)
        self._set("_own_keys", frozenset(own_keys))
        stage = self.get_value("zero_optimization.stage")
        if stage is not None and stage != AUTO:
            self._check_offload(check_whole("zero_optimization.stage", stage, at_least=0))
        for name, key in _KEYS.items():
            value = self.get_value(key)
            if getattr(self, name) is None and value is not None and value != AUTO:
                self._set(name, value)

    def _check_offload(self, stage: int) -> None:
        least = {"optimizer": 1, "param": 3}
        for what, at_least in least.items():
            device = self.get_value(f"zero_optimization.offload_{what}.device", "none")
            if device not in {"none", AUTO, None} and stage < at_least:
                raise ConfigError(
                    f"offload_{what}_device={device!r} needs zero_stage={at_least} or more, and the stage is {stage}."
                )

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The configuration, to read and to change; models are prepared with what it says then."""
        config: dict[str, Any] = self.hf_ds_config.config
        return config

    @property
    def stage(self) -> int:
        """The ZeRO stage, 2 where nothing says another one."""
        stage = self.get_value("zero_optimization.stage")
        return 2 if stage in {None, AUTO} else int(stage)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key such as ``"zero_optimization.stage"``, or ``default`` if it is not there."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a key is there and ``"auto"``."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill in one key if it is ``"auto"``; else compare it.

        Args:
            ds_key_long: its dotted name.
            mismatches: gets a line if it has another value.
            must_match: compare it.
            **kwargs: values by dotted names.

        Raises:
            ConfigError: it is ``"auto"``, and ``kwargs`` has no value for it.
        """
        node, key = self.hf_ds_config.find_config_node(ds_key_long)
        if node is None:
            return
        if node.get(key) == AUTO:
            if ds_key_long not in kwargs:
                raise ConfigError(f"{ds_key_long} is 'auto' in the DeepSpeed configuration. Write its value there.")
            node[key] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and ds_key_long in kwargs:
            mismatches += contradictions(self.deepspeed_config, {ds_key_long: kwargs[ds_key_long]})

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill in all keys that are ``"auto"``; compare the others.

        Args:
            prefix: the dotted name of the section to begin with, and a dot; empty for all.
            mismatches: gets a line for each key that has another value.
            config: the section.
            must_match: compare keys that are not ``"auto"``.
            **kwargs: values by dotted names.

        Raises:
            ConfigError: a key has another value, or none.
        """
        problems: list[str] = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", problems, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, problems, must_match, **kwargs)
        if problems and not prefix:
            raise ConfigError(f"The DeepSpeed configuration contradicts what is asked for: {'; '.join(problems)}.")

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch one precision on in the configuration, where it leaves that open.

        Raises:
            ConfigError: it says another one.
        """
        other = {"bf16": "fp16", "fp16": "bf16"}.get(mixed_precision)
        if other is None:
            return
        if self.get_value(f"{other}.enabled") is True or self.get_value(f"{mixed_precision}.enabled") is False:
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} was asked for, but the DeepSpeed configuration has "
                f"{other}.enabled true, or {mixed_precision}.enabled false. Leave out one of the two."
            )
        self.deepspeed_config.setdefault(mixed_precision, {})["enabled"] = True

    @property
    def precision(self) -> str | None:
        """The precision that the configuration switches on; None if it leaves that open."""
        return next((name for name in ("bf16", "fp16") if self.get_value(f"{name}.enabled") is True), None)

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models of transformers are made sharded from the first."""
        return self.stage == 3 and self.zero3_init_flag is not False

    def set_deepspeed_weakref(self) -> None:
        """Tell transformers about the configuration, so that ``from_pretrained`` shards models from the first."""
        tell_transformers(self)

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Return a block in which models of transformers are made sharded from the first, or are not.

        Args:
            enable: whether they are.
        """
        before = self.zero3_init_flag
        self._set("zero3_init_flag", enable)
        tell_transformers(self)
        try:
            yield
        finally:
            self._set("zero3_init_flag", before)
            tell_transformers(self)

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Make stage 3 gather the layers whole that ``transformer_moe_cls_names`` names. Preparing a model does so.

        Raises:
            ConfigError: the model has no such layer.
        """
        names = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip()]
        classes = {type(part).__name__: type(part) for part in model.modules()}
        missing = [name for name in names if name not in classes]
        if missing:
            raise ConfigError(
                f"transformer_moe_cls_names names {', '.join(missing)}, and {type(model).__name__} has no such layer. "
                f"It has {', '.join(sorted(classes))}."
            )
        if names:
            import deepspeed

            deepspeed.utils.set_z3_leaf_modules(model, [classes[name] for name in names])

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Refuse: ``accelerator.state.select_deepspeed_plugin(name)`` selects one of several plugins.

        Raises:
            ConfigError: always, unless that method calls it.
        """
        if not _from_accelerator_state:
            raise ConfigError("Write accelerator.state.select_deepspeed_plugin(name) to select a plugin.")
        self._set("selected", True)

    def deselect(self) -> None:
        """Note that another plugin is selected."""
        self._set("selected", False)


def tell_transformers(plugin: DeepSpeedPlugin) -> None:
    """Make ``from_pretrained`` of transformers shard models from the first, as a plugin says; undo it otherwise."""
    # transformers keeps a weak reference to an object of its own, which lives as long as the plugin. Does nothing where
    # transformers is not installed.
    vars(plugin).pop("_told", None)
    if not plugin.is_zero3_init_enabled() or not is_installed("transformers"):
        return
    integrations: Any = importlib.import_module("transformers.integrations")
    steps = ("optimizer", "scheduler")  # what models are made with says nothing about how they are trained
    usable = filled({key: value for key, value in plugin.deepspeed_config.items() if key not in steps}, {})
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & usable.keys():
        usable["train_micro_batch_size_per_gpu"] = 1  # zero.Init asks for one, and uses none
    vars(plugin)["_told"] = integrations.HfDeepSpeedConfig(usable)


def resolve_deepspeed(
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, environment: Environment
) -> dict[str, DeepSpeedPlugin] | None:
    """Return plugins by name, completed by variables; None without any, and without ``ACCELERATE_USE_DEEPSPEED``.

    Of several, by names of the user's, the first is selected.
    """
    if plugin is None:
        if not environment.flag(USES["DEEPSPEED"]):
            return None
        plugin = DeepSpeedPlugin(hf_ds_config=environment.text(DEEPSPEED["deepspeed_config_file"]))
    plugins: dict[str, Any] = dict(plugin) if isinstance(plugin, dict) and plugin else {"default": plugin}
    for candidate in plugins.values():
        check_options("deepspeed_plugin", candidate, DeepSpeedPlugin)
        _complete(candidate, environment)
    if not any(candidate.selected for candidate in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins


def _complete(plugin: DeepSpeedPlugin, environment: Environment) -> None:
    """Take from the environment what a plugin leaves open. What its configuration says counts more."""
    values = fields_in(environment, plugin, _VARIABLES)
    clipping = environment.text(DEEPSPEED["gradient_clipping"])
    if plugin.gradient_clipping is None and clipping not in {None, AUTO}:
        try:
            values["gradient_clipping"] = float(str(clipping))
        except ValueError:
            raise ConfigError(f"ACCELERATE_GRADIENT_CLIPPING={clipping!r} is not a number. Write 1.0, say.") from None
    if plugin.zero_stage is None:
        values.setdefault("zero_stage", 2)
    for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if values.get(name) == "none":  # accelerate's launcher always sets them
            del values[name]
    if values:
        completed = replace(plugin, **values, hf_ds_config=HfDeepSpeedConfig(plugin.hf_ds_config))
        vars(plugin).update({name: getattr(completed, name) for name in (*values, "_own_keys")})
        plugin.hf_ds_config.config.clear()
        plugin.hf_ds_config.config.update(completed.hf_ds_config.config)
