"""Seed random numbers, save and restore their states, and give all ranks the state of rank 0."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_whole
from nb_accelerate.base.config.distributed import Word
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.devices.xla import is_started as xla_is_started
from nb_accelerate.training.process import context
from nb_accelerate.training.process.devices import device_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nb_accelerate.base.devices import DeviceKind


class RNGType(Word):
    """A source of random numbers that ranks can keep in step."""

    TORCH = "torch"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"
    XLA = "xla"
    GENERATOR = "generator"

    @classmethod
    @override
    def _missing_(cls, value: object) -> RNGType | None:
        """Return the member of a type of device that has no name here, by torch's name for it."""
        if value not in _devices_with_numbers():
            return None
        member = str.__new__(cls, value)
        member._name_, member._value_ = str(value).upper(), str(value)
        return member


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random numbers of Python, numpy, torch and every device.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: add the rank, so that every rank draws other numbers.
        deterministic: also tell torch to use deterministic algorithms only.

    Raises:
        ConfigError: ``seed`` is not a whole number, or is negative.
    """
    check_whole("seed", seed, at_least=0)
    if device_specific:
        seed += context.topology_here().rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds every device as well, once it is used
    if (xla := _xla_model()) is not None:
        xla.set_rng_state(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def capture(kind: DeviceKind, *, all_devices: bool = True) -> dict[str, Any]:
    """Return the states of all random numbers of this process, under accelerate's names for them.

    Args:
        kind: of its devices. Others are not touched: that would start their runtime.
        all_devices: also the states of devices that this process sees and does not use, as accelerate's checkpoints
            have them. `restore` gives the state of the current device to the one that is current then, in any case.
    """
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    if kind.get_rng_state is not None:
        of_all = kind.get_rng_states if all_devices else None
        states[f"torch_{kind.name}_manual_seed"] = [kind.get_rng_state()] if of_all is None else list(of_all())
        states[f"torch_{kind.name}_used"] = 0 if of_all is None else kind.current_device()  # of that list
    if (xla := _xla_model()) is not None:
        states["xm_seed"] = xla.get_rng_state()
    return states


def restore(states: Mapping[str, Any], kind: DeviceKind) -> None:
    """Put states back that `capture` returned. Missing ones are not changed."""
    if "random_state" in states:
        version, numbers, gauss = states["random_state"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy_random_seed" in states:
        np.random.set_state(states["numpy_random_seed"])
    if "torch_manual_seed" in states:
        torch.set_rng_state(states["torch_manual_seed"])
    if of_devices := states.get(f"torch_{kind.name}_manual_seed"):
        current, used = kind.current_device(), states.get(f"torch_{kind.name}_used")
        sees_as_many = len(of_devices) == kind.count()
        # A process may see more devices now, or fewer: where each sees its own, all of them are number 0. accelerate's
        # files do not say which one was used: that with the number of the local rank.
        if used is None:
            used = current if sees_as_many else context.topology_here().local_rank % len(of_devices)
        if sees_as_many:
            for number, state in enumerate(of_devices):
                if number != current:
                    kind.set_rng_state(state, number)
        kind.set_rng_state(of_devices[used])
    if "xm_seed" in states and (xla := _xla_model()) is not None:
        xla.set_rng_state(states["xm_seed"])


def resolve_rng_types(given: Sequence[str | RNGType] | None) -> tuple[RNGType, ...]:
    """Check the ``rng_types`` argument of `Accelerator`; by default only generators of samplers are kept in step."""
    if given is None:
        return (RNGType.GENERATOR,)
    known = dict.fromkeys([*(member.value for member in RNGType), *_devices_with_numbers()])
    return tuple(RNGType(check_choice("rng_types", item, known)) for item in given)


def synchronize(
    rng_types: Sequence[RNGType],
    broadcast: Callable[[torch.Tensor], torch.Tensor],
    generator: torch.Generator | None = None,
) -> None:
    """Give this rank the random states of rank 0. All ranks call it together."""
    for rng_type in rng_types:
        if rng_type is RNGType.GENERATOR:
            if generator is not None:
                generator.set_state(broadcast(generator.get_state()))
        elif rng_type is RNGType.XLA:
            if (xla := _xla_model()) is not None:
                xla.set_rng_state(int(broadcast(torch.tensor(xla.get_rng_state(), device="cpu")).item()))
        elif rng_type is RNGType.TORCH:
            torch.set_rng_state(broadcast(torch.get_rng_state()))
        else:
            kind = device_kind(rng_type.value)
            if kind.get_rng_state is not None and kind.is_available():
                kind.set_rng_state(broadcast(kind.get_rng_state()))


def _devices_with_numbers() -> list[str]:
    """Return the names of the types of devices that have random numbers of their own."""
    return [kind.name for kind in DEVICE_KINDS if kind.get_rng_state is not None]


def _xla_model() -> Any:
    """Return torch_xla's module with random numbers, or None where its runtime was not started, which they would do."""
    return sys.modules.get("torch_xla.core.xla_model") if xla_is_started() else None
