"""Tell runs apart by the settings in which they differ."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MAX_TEXT = 40  # characters of a setting that are shown

_SECRET = re.compile(r"(token|secret|key|passw\w*|pwd|credentials?|auth)(_|$)")


def is_secret(name: str, value: object) -> bool:
    """Return whether a setting is not shown, since a notebook that is saved keeps what is: ``hf_token``, a text."""
    return isinstance(value, str) and bool(_SECRET.search(name.lower()))


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings that are not the same in all runs, in the order in which they first came."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({_shown(config, name) for config in configs}) > 1]


def settings(config: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return some settings in words: ``lr=0.1, depth=3``."""
    shown_names = [name for name in names if name in config and not is_secret(name, config[name])]
    return ", ".join(f"{name}={shown(config[name])}" for name in shown_names)


def labels(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what runs are called in a legend: by their settings, by their names too where those leave a doubt."""
    told = differing(configs)
    texts = [settings(config, told) for config in configs]
    if "" in texts or len(set(texts)) < len(texts):
        return [", ".join(filter(None, both)) for both in zip(names, texts, strict=True)]
    return texts


def shown(value: Any) -> str:
    """Return a value as it stands in a table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def _shown(config: Mapping[str, Any], name: str) -> str:
    """Return the ``repr`` of a whole setting, which can be compared for any type."""
    return repr(config[name]) if name in config and not is_secret(name, config[name]) else ""
