"""Names of ``accelerate.commands.config``: where the configuration file is, and what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.config.file import default_path, read_config
from nb_accelerate.compat.launching import write_basic_config

if TYPE_CHECKING:
    from nb_accelerate.base.config.file import ConfigFile

__all__ = ["default_config_file", "load_config_from_file", "write_basic_config"]

default_config_file = str(default_path())


def load_config_from_file(config_file: str | None) -> ConfigFile:
    """Read a configuration file; None is the default one.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    file = read_config(config_file or default_config_file)
    assert file is not None  # with a path, that is an error
    return file
