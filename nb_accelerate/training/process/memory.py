"""Give memory of the device back, and find a batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.errors.out_of_memory import says_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached memory back to the devices of this machine.

    Args:
        garbage_collection: first collect what only reference cycles keep alive.
    """
    if garbage_collection:
        gc.collect()
    for kind in DEVICE_KINDS:
        if kind.is_available():
            kind.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop references to objects, and give their memory back to the device.

    Examples:
        ```python
        model, optimizer = release_memory(model, optimizer)
        ```

    Returns:
        As many None as objects were given. Assign them: the caller's own variables keep objects alive.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception says that memory did not suffice, on a device or on the CPU."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and says_out_of_memory("RuntimeError", str(exception))


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Call a function with smaller and smaller batch sizes until one fits into memory. Use it as a decorator.

    Later calls start with the size that was found. On several processes each looks for itself; give all the same
    size, or one of them waits for the others.

    Examples:
        ```python
        @find_executable_batch_size(starting_batch_size=256)
        def train(batch_size, model):
            ...

        train(model)
        ```

    Args:
        function: takes the batch size as its first argument; a method takes it after ``self``.
        starting_batch_size: where to begin.
        reduce_batch_size_fn: returns the next batch size; by default nine tenths of the one before.

    Raises:
        ConfigError: ``starting_batch_size`` is not a whole number above 0.
        TypeError: the function takes no batch size, or was called with one.
        RuntimeError: no batch size fits.
    """
    check_whole("starting_batch_size", starting_batch_size, at_least=1)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    wanted = list(inspect.signature(function).parameters)
    before = 1 if wanted[:1] in (["self"], ["cls"]) else 0
    name = getattr(function, "__name__", "function")
    if len(wanted) <= before:
        raise TypeError(
            f"{name} takes no batch size, so none can be tried. Write def {name}({', '.join([*wanted, 'batch_size'])})"
        )
    batch_size = starting_batch_size

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        if len(args) >= len(wanted):  # the batch size is among them, and would push each argument one place on
            raise TypeError(
                f"{name} was called with {len(args) - before} arguments, but its batch size {wanted[before]!r} is "
                f"found for you. Write {name}({', '.join(wanted[before + 1 :])})."
            )
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(*args[:before], batch_size, *args[before:], **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside of the except block: the exception keeps the failed call's tensors alive.
            clear_device_cache(garbage_collection=True)
            smaller = reduce_batch_size_fn() if reduce_batch_size_fn else batch_size * 9 // 10
            logger.info("%s: a batch of %d does not fit into memory, trying %d", name, batch_size, smaller)
            batch_size = smaller
        raise RuntimeError(
            f"No batch size fits into memory: {name} failed with every one from {starting_batch_size} down to 1. "
            "Use a smaller model, or free memory before."
        )

    return run
