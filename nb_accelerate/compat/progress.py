"""Progress bars for many processes."""

from __future__ import annotations

from typing import Any

from nb_accelerate.process import context


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
