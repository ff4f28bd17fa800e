"""Choose how models are trained with DeepSpeed: by the argument of an `Accelerator`, and by variables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_options
from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
from nb_accelerate.base.config.deepspeed_json import AUTO, HfDeepSpeedConfig
from nb_accelerate.base.config.options import fields_in
from nb_accelerate.base.config.variables import DEEPSPEED, USES
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.config.env import Environment

_READ_APART = ("gradient_accumulation_steps", "gradient_clipping")
"""Fields whose variables count with all engines, or may be ``"auto"``."""

_VARIABLES = {field: name for field, name in DEEPSPEED.items() if field not in _READ_APART}
_VARIABLES["transformer_moe_cls_names"] = DEEPSPEED["deepspeed_moe_layer_cls_names"]


def resolve_deepspeed(
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None, environment: Environment
) -> dict[str, DeepSpeedPlugin] | None:
    """Choose how models are trained with DeepSpeed: the plugins, and for what they leave open variables.

    Args:
        plugin: one, or several by names of the user's; the first of them is selected.

    Returns:
        Plugins by name; None if there is none, and ``ACCELERATE_USE_DEEPSPEED`` is not set.
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
    found = fields_in(environment, plugin, _VARIABLES)
    clipping = environment.text(DEEPSPEED["gradient_clipping"])
    if plugin.gradient_clipping is None and clipping not in {None, AUTO}:
        try:
            found["gradient_clipping"] = float(str(clipping))
        except ValueError:
            raise ConfigError(f"ACCELERATE_GRADIENT_CLIPPING={clipping!r} is not a number. Write 1.0, say.") from None
    if plugin.zero_stage is None:
        found.setdefault("zero_stage", 2)
    for name in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        if found.get(name) == "none":  # accelerate's launcher always sets them
            del found[name]
    if found.get("zero_stage", plugin.zero_stage) != 3:
        found.pop("zero3_init_flag", None)  # accelerate's launcher sets it with any stage
    if found:
        completed = replace(plugin, **found, hf_ds_config=HfDeepSpeedConfig(plugin.hf_ds_config))
        vars(plugin).update({name: getattr(completed, name) for name in (*found, "_own_keys")})
        plugin.hf_ds_config.config.clear()
        plugin.hf_ds_config.config.update(completed.hf_ds_config.config)
