"""`Environment`: the only code that reads our environment variables.

Names are those of Hugging Face accelerate, so a script that was configured for it keeps its configuration.
A variable that is set to an empty string counts as not set; then the configuration file decides, if there is one
(see `base.config.file`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.config.engine import VARIABLES, EngineOptions
from nb_accelerate.base.config.file import NO_WORDS, read_config
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Options that ``%distributed config`` has set in this notebook, by the names that they have as arguments.
SESSION_DEFAULTS: dict[str, Any] = {}


_YES = ("1", "true", "yes", "y", "on", "t")


DEBUG_MODE = "ACCELERATE_DEBUG_MODE"
DEVICE = "NB_ACCELERATE_DEVICE"
RESUME = "NB_ACCELERATE_RESUME"
LAUNCH = "NB_ACCELERATE_LAUNCH"


class Environment:
    """A typed view of environment variables.

    Args:
        variables: the only source of values, for tests. None reads the environment of this process at each call, and
            the configuration file for variables that are not set.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables: Mapping[str, str] = os.environ if variables is None else variables
        self._is_given = variables is not None

    def text(self, name: str) -> str | None:
        """Return the value of ``name``, or None if it is not set."""
        value = self.variables.get(name, "").strip()
        if not value and not self._is_given and (file := read_config()) is not None:
            value = file.as_variables(self.variables).get(name, "")
        return value or None

    def flag(self, name: str) -> bool | None:
        """Return the value of ``name`` as a yes or no, or None if it is not set."""
        word = self.text(name)
        if word is None:
            return None
        if word.lower() in _YES:
            return True
        if word.lower() in NO_WORDS:
            return False
        raise ConfigError(f"The environment variable {name}={word!r} is not a yes or no. Write {name}=1 or {name}=0.")

    def whole(self, name: str, *, at_least: int = 0) -> int | None:
        """Return the value of ``name`` as a whole number, or None if it is not set."""
        word = self.text(name)
        if word is None:
            return None
        try:
            number = int(word)
        except ValueError:
            raise ConfigError(
                f"The environment variable {name}={word!r} is not a whole number. Write {name}={at_least}, say."
            ) from None
        return check_whole(f"The environment variable {name}", number, at_least=at_least)

    @property
    def use_cpu(self) -> bool | None:
        """``ACCELERATE_USE_CPU``: train on the CPU even where there is an accelerator."""
        return self.flag("ACCELERATE_USE_CPU")

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``: batches for one optimizer step."""
        return self.whole("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", at_least=1)

    @property
    def debug_mode(self) -> bool:
        """``ACCELERATE_DEBUG_MODE``: compare what ranks hand to a collective before it runs."""
        return bool(self.flag(DEBUG_MODE))

    @staticmethod
    def set_debug_mode(on: bool) -> None:
        """Set ``ACCELERATE_DEBUG_MODE`` for this process and those it starts."""
        os.environ[DEBUG_MODE] = str(int(on))

    @staticmethod
    def set_rank_0_loading(on: bool = True) -> None:
        """Set the variables by which transformers loads pretrained weights on rank 0 only, for this process."""
        if on:
            os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(on).lower()

    @property
    def num_threads(self) -> int | None:
        """``OMP_NUM_THREADS``: threads of a process, the first number of a list; None if it is not a number."""
        first = (self.text("OMP_NUM_THREADS") or "").partition(",")[0].strip()
        return int(first) if first.isdecimal() and int(first) > 0 else None

    @property
    def keep_warm(self) -> bool:
        """``NB_ACCELERATE_KEEP_WARM``: keep the process that ranks are forked from between launches; yes by default."""
        return self.flag("NB_ACCELERATE_KEEP_WARM") is not False

    def engine_options(self, **given: Any) -> EngineOptions:
        """Return who places the ranks of a launch, and where.

        An option that the call does not give is what ``%distributed config`` has set, or else its environment variable
        (``NB_ACCELERATE_ENGINE``, ``NB_ACCELERATE_HOSTS`` ...), or else what the configuration file says.
        """
        settings = {
            name: word for name, variable in VARIABLES.items() if (word := self.variables.get(variable, "").strip())
        }
        if not self._is_given:
            file = read_config()
            of_notebook = {name: SESSION_DEFAULTS[name] for name in VARIABLES if name in SESSION_DEFAULTS}
            settings = {**(file.section("engine_config") if file is not None else {}), **settings, **of_notebook}
        return EngineOptions.chosen(settings, **given)

    @property
    def resume(self) -> bool | None:
        """``NB_ACCELERATE_RESUME``: go on from the newest checkpoint; None if nobody has said."""
        return self.flag(RESUME)

    @property
    def has_rendezvous(self) -> bool:
        """Whether ``MASTER_ADDR`` and ``MASTER_PORT`` say where ranks meet."""
        return self.text("MASTER_ADDR") is not None and self.text("MASTER_PORT") is not None

    @property
    def has_agent_store(self) -> bool:
        """``TORCHELASTIC_USE_AGENT_STORE``: the launcher of the ranks serves the store of their process groups."""
        return self.text("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextlib.contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Return a block in which variables of this process are set, for a library that takes options in no other way."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
