"""Logging and progress bars that only the main process writes by default."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.env import Environment
from nb_accelerate.training.process import context
from nb_accelerate.training.state.choices import current_collectives

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class MultiProcessAdapter(_Adapter):
    """Log on the main process, on all processes, or on one after the other. Made by `get_logger`."""

    @override
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message; `info`, `warning` and the others come here.

        Args:
            level: as in `logging`.
            msg: the message.
            *args: arguments of its ``%`` format.
            **kwargs: those of `logging.Logger.log`, and two of ours: ``main_process_only``, True by default, and
                ``in_order``: processes log one after the other. All of them must log the message then, because
                each waits for those before it.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # the line that is shown is the caller's, not one of this file
        collectives = current_collectives() if in_order else None
        turns = [collectives.rank == rank for rank in range(collectives.world_size)] if collectives else []
        # In order, all processes enter every barrier, also those whose level does not show the message.
        for mine in turns or [not main_process_only or context.topology_here().is_main]:
            if mine and self.isEnabledFor(level):
                text, options = self.process(msg, kwargs)
                self.logger.log(level, text, *args, **options)
            if collectives:
                collectives.barrier()

    @functools.lru_cache(None)  # noqa: B019 - loggers live as long as the program
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn the first time this is called with these arguments, and never again."""
        kwargs.setdefault("stacklevel", 3)
        # Not by `warning`, which is a frame of `logging`: Python 3.10 would count it.
        self.log(logging.WARNING, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that logs on the main process only, unless a message asks for more.

    Examples:
        ```python
        logger = get_logger(__name__, log_level="INFO")
        logger.info("by the main process")
        logger.info("by every process", main_process_only=False)
        logger.info("by every process, in order of rank", main_process_only=False, in_order=True)
        ```

    Args:
        name: usually ``__name__``.
        log_level: the level of this logger and of the root logger; else ``ACCELERATE_LOG_LEVEL``.
    """
    logger = logging.getLogger(name)
    level = log_level or Environment().text("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a tqdm bar that only the first process of each machine shows.

    Args:
        *args: those of `tqdm.auto.tqdm`.
        main_process_only: False shows one bar for each process.
        **kwargs: those of `tqdm.auto.tqdm`.
    """
    if args and isinstance(args[0], bool):
        raise TypeError(
            f"tqdm was given {args[0]} as its first argument, which is what to iterate over. Write "
            f"tqdm(items, main_process_only={args[0]})."
        )
    from tqdm.auto import tqdm as bar

    if main_process_only:
        kwargs["disable"] = kwargs.get("disable", False) or not context.topology_here().is_local_main
    return bar(*args, **kwargs)


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text with a unit of 1024: ``"2.0 KB"`` is 2048 bytes."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"
