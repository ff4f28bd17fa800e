"""DeepSpeed's JSON configuration: read it, ask for its values by dotted names, fill in what it leaves to ``"auto"``.

Format: https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import described, shown
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AUTO = "auto"  # the value of a key that is filled in when models are prepared


class HfDeepSpeedConfig:
    """A DeepSpeed configuration whose values can be asked for by dotted names.

    Args:
        config_file_or_dict: a dict, which is copied; the path of a JSON file; or JSON as text, plain or as base64.

    Attributes:
        config: the configuration as nested dicts.

    Raises:
        ConfigError: there is no such file, or it is no JSON object.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = read_deepspeed_config(config_file_or_dict)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that has, or would have, a key, and the last part of the key; None if there is none."""
        return _node_of(self.config, ds_key_long)

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key such as ``"zero_optimization.stage"``, or ``default`` if it is not there."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key and all that is below it.

        Args:
            ds_key_long: its dotted name.
            must_exist: refuse to remove what is not there.

        Raises:
            ConfigError: it is not there, and must be.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ConfigError(f"The DeepSpeed configuration has no {ds_key_long!r} to remove: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a key is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a key is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether gradients are sharded, and parameters are not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether parameters are sharded."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether optimizer state or parameters are kept outside of the device."""
        devices = {self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")}
        return (self.is_zero2() or self.is_zero3()) and bool(devices & {"cpu", "nvme"})

    def set_stage_and_offload(self) -> None:
        """Do nothing: stage and offload are read from ``config`` when they are asked for. For ported code."""


def _node_of(config: Any, name: str) -> tuple[dict[str, Any] | None, str]:
    """Return the dict that has, or would have, a dotted name, and the last part of the name; None if there is none."""
    *sections, key = name.split(".")
    for section in sections:
        config = config.get(section) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else None, key


def read_deepspeed_config(source: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration, given as to `HfDeepSpeedConfig`, as nested dicts that belong to the caller."""
    if isinstance(source, HfDeepSpeedConfig) or isinstance(getattr(source, "config", None), dict):
        return copy.deepcopy(source.config)
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"hf_ds_config={shown(source)} is {described(source)}. Write the path of a JSON file, or the configuration "
            "as a dict."
        )
    text = str(source)
    path = Path(source).expanduser()
    is_file = len(text) < 4096 and path.is_file()
    for read in (lambda: path.read_text(encoding="utf-8") if is_file else text, lambda: base64.urlsafe_b64decode(text)):
        with contextlib.suppress(ValueError):
            config = json.loads(read())
            if isinstance(config, dict):
                return config
    raise ConfigError(
        f"hf_ds_config={text[:200]!r} is {'not a file with' if is_file else 'no file, and'} no JSON object either. "
        "Write the path of a DeepSpeed configuration, or the configuration as a dict."
    )


def contradictions(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each value that a configuration has otherwise, with both values.

    Args:
        config: nested dicts; what is ``"auto"`` in them contradicts nothing.
        values: by dotted names.
    """
    problems = []
    for name, value in values.items():
        node, key = _node_of(config, name)
        configured = None if node is None else node.get(key)
        if configured not in (None, AUTO, value):
            problems.append(f"{name} is {configured!r} in the configuration and {value!r} here")
    return problems


def filled(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration in which no key is ``"auto"``.

    Args:
        values: for keys that are ``"auto"``, by dotted names. A key whose value is None is left out, and has
            DeepSpeed's default.
    """
    result: dict[str, Any] = copy.deepcopy(dict(config))
    for name in list(auto_keys(result)):
        node, key = _node_of(result, name)
        assert node is not None  # it has this key
        if values.get(name) is not None:
            node[key] = values[name]
        elif name == "scheduler.params.total_num_steps":  # for which DeepSpeed has no default
            raise ConfigError(
                f"{name} is 'auto' in the DeepSpeed configuration, and nothing says what it is. Prepare a "
                "DummyScheduler(optimizer, total_num_steps=...) together with the model, or write a number there."
            )
        else:
            del node[key]
    return result


def auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys that are ``"auto"``."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from auto_keys(value, f"{prefix}{key}.")
        elif isinstance(value, str) and value == AUTO:
            yield f"{prefix}{key}"
