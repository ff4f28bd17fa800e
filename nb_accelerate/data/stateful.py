"""Loaders that can save their position and take it up again, with the help of torchdata.

A prepared loader looks one batch ahead. What it has to save is where it was before it looked.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.data.adapter import DataLoaderAdapter


def is_stateful(loader: object) -> bool:
    """Whether a loader is torchdata's. Does not import it: where it was not imported there is none."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(loader, module.StatefulDataLoader)


@functools.cache
def stateful(kind: type[DataLoaderAdapter]) -> type[DataLoaderAdapter]:
    """Return a kind of prepared loader with ``state_dict`` and ``load_state_dict``, built on torchdata's loader.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        raise MissingDependencyError(
            "torchdata", needed_for="DataLoaderConfiguration(use_stateful_dataloader=True)", extra="torchdata"
        ) from None

    class Stateful(kind, StatefulDataLoader):  # type: ignore[misc, valid-type]  # both are loaders of torch
        """A loader that saves its position, and the state of samplers and datasets that have one."""

        _before: dict[str, Any] | None = None

        def _source(self) -> Iterator[Any]:
            return self._remembered(super()._source())

        def _source_from(self, position: int) -> Iterator[Any]:  # noqa: ARG002 - torchdata's loader knows it
            source: Any = iter(StatefulDataLoader.__iter__(self))
            # torchdata reads up to here in a dataset that has no state, and counts what it reads a second time.
            if self._before is not None and "_num_yielded" in self._before:
                source._num_yielded = self._before["_num_yielded"]  # noqa: SLF001 - nothing public tells it
            return self._remembered(source)

        def _remembered(self, source: Iterator[Any]) -> Iterator[Any]:
            while True:
                self._before = StatefulDataLoader.state_dict(self)
                try:
                    batch = next(source)
                except StopIteration:
                    return
                yield batch

        def _state(self) -> dict[str, Any]:
            # Between epochs there is no position inside torchdata's loader, and one that is over starts samplers twice.
            now = self._before if self._looks_ahead else StatefulDataLoader.state_dict(self)
            state = super()._state()
            return {**state, "loader": (now if state["position"] else None) or {}}

        def state_dict(self) -> dict[str, Any]:
            return kind.state_dict(self)  # of the two bases

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            kind.load_state_dict(self, state_dict)
            StatefulDataLoader.load_state_dict(self, state_dict["loader"])
            self._before = state_dict["loader"]

    Stateful.__name__ = Stateful.__qualname__ = f"Stateful{kind.__name__}"
    return Stateful
