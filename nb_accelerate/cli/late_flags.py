"""Flags of `launch` that stand after the script, and so were given to the script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.cli.flags import GROUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

_FOR_PROCESSES = {
    flag.name: flag
    for _, flags in GROUPS
    for flag in flags
    if flag.name in ("num_processes", "multi_gpu", "gpu_ids", "num_machines")
}
"""Flags that ask for more processes. Scripts often have others of these names, such as ``--mixed_precision``."""


def flag_of_the_target(target: str, arguments: Sequence[str]) -> str:
    """Return a sentence about a flag for more processes that stands after the target; "" if there is none.

    Args:
        arguments: of the target, as they were typed.
    """
    for place, argument in enumerate(arguments):
        flag = _FOR_PROCESSES.get(argument.partition("=")[0].removeprefix("--").replace("-", "_"))
        if flag is None or not argument.startswith("--"):
            continue
        has_value = flag.convert is not None and "=" not in argument
        given = " ".join(arguments[place : place + 1 + has_value])
        return (
            f"nb-accelerate: 1 process is started: {given} stands after {target} and was given to it. "
            f"If it is for launch, write: nb-accelerate launch {given} {target}"
        )
    return ""
