"""Draw the order of an epoch again: note the random numbers that it is drawn from when it begins.

A loader that goes on in the middle of an epoch begins the epoch with these numbers, reads as far as was read before,
and puts back the numbers that the process had. So the rows come in the order of the epoch that was interrupted,
independent of numbers drawn since and of the seed of the process.
"""

from __future__ import annotations

import base64
import contextlib
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.data.plan.samplers import (
    BatchSamplerShard,
    SamplerShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from nb_accelerate.training.data.plan.shuffling import SeededGenerator
from nb_accelerate.training.data.resuming.stateful import is_stateful

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

_OF_PROCESS = {"torch": torch.default_generator, "python": random, "numpy": np.random}
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DRAW_NOTHING = {
    *(list, tuple, range, SequentialSampler, SeedableRandomSampler),
    *(BatchSampler, BatchSamplerShard, SamplerShard, SkipBatchSampler),
}
_ERRORS = (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)  # of a damaged state
_SHUFFLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class Order:
    """The states of random numbers by which the order of an epoch is drawn again."""

    began: Mapping[str, Any] | None  # all that it may be drawn from; None between epochs, or if they are not known
    now: Mapping[str, Any]  # those of the generators that the loader and its samplers hold

    def encoded(self) -> dict[str, Any]:
        """Return this as what JSON can hold; empty if there is nothing to draw."""
        both = {"began": _encoded(self.began), "now": _encoded(self.now)}
        return {name: states for name, states in both.items() if states}

    @classmethod
    def decoded(cls, state: Any) -> Order:
        """Return what was `encoded`; a `CheckpointError` if it is something else."""
        try:
            began, now = (dict(_decoded(state.get(name, {}))) for name in ("began", "now"))
            # States are tried on other generators first: a damaged one is refused before anything is changed.
            tried = {"torch": torch.Generator(), "python": random.Random(), "numpy": np.random.RandomState()}  # noqa: S311
            for name in began.keys() & tried.keys():
                _put(tried[name], began[name])
        except _ERRORS as error:
            raise _damaged(error) from error
        return cls(began or None, now)

    def put_back(self, loader: DataLoader[Any]) -> None:
        """Give the generators that a loader and its samplers hold the states that they had when this was saved."""
        _put_all(self.now, _held_by(loader))

    @contextlib.contextmanager
    def again(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Return a block in which the epoch is begun again. It restores the generators that the loader holds."""
        _put_all(self.began or {}, {**_OF_PROCESS, **_held_by(loader)})
        yield
        self.put_back(loader)


def numbers_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the states of all random numbers that the order of an epoch may be drawn from; none if it is not drawn."""
    generators = _held_by(loader)
    if _may_draw(loader):
        generators |= _OF_PROCESS
    return {name: _get(generator) for name, generator in generators.items()}


def order_of(loader: DataLoader[Any], began: Mapping[str, Any] | None) -> Order | None:
    """Return what the order is drawn from, for a position that is saved now; None if it is not drawn.

    ``began`` is what `numbers_of` returned when the epoch began; None between epochs.
    """
    order = Order(began, {name: _get(generator) for name, generator in _held_by(loader).items()})
    return order if order.began or order.now else None


def shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether one of torch's samplers draws the order of an epoch from numbers that go on."""
    samplers = _samplers(loader)
    return any(isinstance(sampler, _SHUFFLE) and not isinstance(sampler, SeedableRandomSampler) for sampler in samplers)


def _may_draw(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return not hasattr(loader.dataset, "state_dict")  # which says where it goes on
    kinds = {type(sampler) for sampler in _samplers(loader)} - _DRAW_NOTHING
    if is_stateful(loader):  # it saves the states of torchdata's samplers with its position
        kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] != "torchdata"}
    return bool(kinds)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the sampler of a loader, and all samplers in it."""
    samplers: list[Any] = []
    queue: list[Any] = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while queue:
        sampler = queue.pop(0)
        if not any(sampler is other for other in samplers):
            samplers.append(sampler)
            inside = vars(sampler) if hasattr(sampler, "__dict__") else {}
            queue += [
                value
                for name, value in inside.items()
                if value is not None and (name in ("sampler", "batch_sampler") or isinstance(value, Sampler))
            ]
    return samplers


def _held_by(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the generators that a loader, its samplers, and a dataset that is read in order hold, by name."""
    # Wrappers have no part in the names: a run may go on with another number of ranks.
    if is_stateful(loader) and not _may_draw(loader):
        return {}  # torchdata saves all that there is
    owners = [loader.dataset, *_samplers(loader)] if isinstance(loader.dataset, IterableDataset) else _samplers(loader)
    generators: dict[str, Any] = {} if loader.generator is None else {"loader": loader.generator}
    for owner in owners:
        if isinstance(owner, SeedableRandomSampler) or not hasattr(owner, "__dict__"):
            continue
        for name, value in vars(owner).items():
            is_left_out = isinstance(value, SeededGenerator) or any(value is other for other in generators.values())
            if isinstance(value, _GENERATORS) and not is_left_out:
                generators[f"{type(owner).__name__}.{name}"] = value
    return generators


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if hasattr(generator, "getstate"):
        version, numbers, gauss = generator.getstate()
        return version, np.array(numbers, np.uint32), gauss
    return generator.get_state(legacy=False)


def _put(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers.tolist()), gauss))
    else:
        generator.set_state(state)


def _put_all(states: Mapping[str, Any], generators: Mapping[str, Any]) -> None:
    for name in states.keys() & generators.keys():
        try:
            _put(generators[name], states[name])
        except _ERRORS as error:
            raise _damaged(error, name) from error


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "data": base64.b64encode(value.tobytes()).decode()}
    if isinstance(value, dict):
        return {name: _encoded(item) for name, item in value.items()}
    return [_encoded(item) for item in value] if isinstance(value, (tuple, list)) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "data"}:
            return np.frombuffer(base64.b64decode(value["data"], validate=True), value["dtype"]).copy()
        return {name: _decoded(item) for name, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _damaged(error: Exception, name: str = "a position") -> CheckpointError:
    return CheckpointError(
        f"The states of random numbers that draw the order of rows cannot be restored ({name}: "
        f"{type(error).__name__}: {error}). Load a position that state_dict() of such a loader returned."
    )
