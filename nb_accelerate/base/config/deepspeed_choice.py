"""Choose how models are trained with DeepSpeed: by the argument of an `Accelerator`, and by variables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_options, described, shown
from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
from nb_accelerate.base.config.deepspeed_json import AUTO, HfDeepSpeedConfig
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.config.env import Environment


def resolve_deepspeed(
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, environment: Environment
) -> dict[str, DeepSpeedPlugin] | None:
    """Choose how models are trained with DeepSpeed: the plugins, and for what they leave open variables.

    Args:
        plugin: one, or several by names of the user's; the first of them is selected.
        environment: ``ACCELERATE_USE_DEEPSPEED`` and ``ACCELERATE_DEEPSPEED_*``.

    Returns:
        Plugins by name; None if there is none, and ``ACCELERATE_USE_DEEPSPEED`` is not set.

    Raises:
        ConfigError: a value is not supported.
    """
    if plugin is None:
        if not environment.flag("ACCELERATE_USE_DEEPSPEED"):
            return None
        plugin = DeepSpeedPlugin(hf_ds_config=environment.text("ACCELERATE_DEEPSPEED_CONFIG_FILE"))
    if isinstance(plugin, DeepSpeedPlugin):
        plugins = {"default": plugin}
    elif isinstance(plugin, dict) and plugin and all(isinstance(one, DeepSpeedPlugin) for one in plugin.values()):
        plugins = dict(plugin)
    elif isinstance(plugin, dict):
        raise ConfigError(
            f"deepspeed_plugins={shown(plugin)} is {described(plugin)} without plugins. Write "
            'deepspeed_plugins={"student": DeepSpeedPlugin(...), "teacher": DeepSpeedPlugin(...)}.'
        )
    else:
        check_options("deepspeed_plugin", plugin, DeepSpeedPlugin)
        raise AssertionError  # the check has refused it
    for one in plugins.values():
        _complete(one, environment)
    if not any(one.selected for one in plugins.values()):
        next(iter(plugins.values())).select(_from_accelerator_state=True)
    return plugins


def _complete(plugin: DeepSpeedPlugin, environment: Environment) -> None:
    """Take from the environment what a plugin leaves open. What its configuration says counts more."""
    found: dict[str, Any] = {
        "gradient_clipping": _number(environment, "ACCELERATE_GRADIENT_CLIPPING"),
        "zero_stage": environment.whole("ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        "offload_optimizer_device": environment.text("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
        "offload_param_device": environment.text("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
        "offload_optimizer_nvme_path": environment.text("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
        "offload_param_nvme_path": environment.text("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
        "zero3_init_flag": environment.flag("ACCELERATE_DEEPSPEED_ZERO3_INIT"),
        "zero3_save_16bit_model": environment.flag("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
        "transformer_moe_cls_names": environment.text("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
    }
    found["zero_stage"] = 2 if found["zero_stage"] is None else found["zero_stage"]
    for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if found[name] == "none":  # accelerate's launcher always sets them
            found[name] = None
    if (plugin.zero_stage if plugin.zero_stage is not None else found["zero_stage"]) != 3:
        found["zero3_init_flag"] = None  # accelerate's launcher sets it with any stage
    missing = {name: value for name, value in found.items() if value is not None and getattr(plugin, name) is None}
    if missing:
        completed = replace(plugin, **missing, hf_ds_config=HfDeepSpeedConfig(plugin.hf_ds_config))
        for name in missing:
            object.__setattr__(plugin, name, getattr(completed, name))
        object.__setattr__(plugin, "_own_keys", vars(plugin)["_own_keys"] | vars(completed)["_own_keys"])
        plugin.hf_ds_config.config.clear()
        plugin.hf_ds_config.config.update(completed.hf_ds_config.config)


def _number(environment: Environment, name: str) -> float | None:
    text = environment.text(name)
    if text is None or text == AUTO:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"The environment variable {name}={text!r} is not a number. Write {name}=1.0, say.") from None
