"""``rehearse``: run a function as some ranks of many on this machine, and say what would happen."""

from __future__ import annotations

import functools
import tempfile
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.launcher import notebook_launcher
from nb_accelerate.training.rehearsal.report import Rehearsal

__all__ = ["Rehearsal", "rehearse"]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SECONDS = 60.0  # that the function has; as many more are for starting, and for code in C that cannot be ended

# Bytes that torch can have of each accelerator, and operations per second in its data sheet: in 16 bits, in 32.
_DEVICES = {
    "A10": (23.7e9, 125e12, 31.2e12),
    "A100": (42.4e9, 312e12, 19.5e12),
    "A100-80GB": (85e9, 312e12, 19.5e12),
    "H100": (85e9, 989e12, 67e12),
    "L4": (23.6e9, 121e12, 30.3e12),
    "P100": (17e9, 18.7e12, 9.3e12),
    "T4": (15.8e9, 65e12, 8.1e12),
    "V100": (16.9e9, 125e12, 15.7e12),
}


def rehearse(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_processes: int = 8,
    ranks: str | Sequence[int] = "ends",
    num_machines: int = 1,
    device: str | None = None,
    memory: int | str | None = None,
) -> Rehearsal:
    """Run a function as some ranks of many on this machine's CPU, and say what would happen in the run.

    Each rank runs alone: what it would exchange with the others is written down, and compared. Two steps of each
    optimizer are computed. What comes later is walked through with the outputs of before, so that ends of epochs,
    evaluation and saves are seen too. Nothing is written: files go to a temporary folder, trackers stay closed. After
    60 s it ends, and says how far it came.

    Examples:
        ```python
        rehearse(train, num_processes=8)
        ```

    Args:
        function: what `notebook_launcher` would run; it makes its own `Accelerator()`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_processes: ranks of the run, on all machines together.
        ranks: which of them to rehearse: ``"ends"``, the first and the last of each machine, or all if there are at
            most 8; ``"all"``; or their numbers.
        num_machines: machines of the run.
        device: an accelerator of the run, "T4" or "A100" say: whether it has room for what a rank holds.
        memory: its bytes, or a text such as "24GB", if it is not one of the known.

    Raises:
        ConfigError: there are no such ranks, they cannot be shared out evenly to the machines, or nobody knows how much
            memory the device has.
        ShippingError: the function cannot be sent to another process.
        DeadlineError: the function is stuck in code that cannot be interrupted.
    """
    bound = functools.partial(function, *args, **(kwargs or {}))
    return run_rehearsal(bound, num_processes, ranks, num_machines, device, memory)


def run_rehearsal(
    function: Callable[[], Any],
    num_processes: int = 8,
    ranks: Any = "ends",
    num_machines: int = 1,
    device: str | None = None,
    memory: int | str | None = None,
    **of_launch: Any,
) -> Rehearsal:
    """Do what `rehearse` does, with options of a launch too: the environment and precision of the ranks."""
    check_whole("num_processes", num_processes, at_least=1)
    check_whole("num_machines", num_machines, at_least=1)
    if num_processes % num_machines:
        raise ConfigError(
            f"num_processes={num_processes} cannot be shared out to num_machines={num_machines}. Write a multiple."
        )
    local = num_processes // num_machines
    if ranks == "all" or (ranks == "ends" and num_processes <= 8):
        ranks = range(num_processes)
    elif ranks == "ends":
        ranks = [rank for rank in range(num_processes) if rank % local in (0, local - 1)]
    if isinstance(ranks, str) or not ranks or not set(ranks) <= set(range(num_processes)):
        raise ConfigError(
            f"ranks={ranks!r} are no ranks of {num_processes}. Write 'ends', 'all', or numbers from 0 to "
            f"{num_processes - 1}."
        )
    topologies = [
        Topology.of_machine(rank % local, local, node_rank=rank // local, num_nodes=num_machines)
        for rank in sorted(set(ranks))
    ]
    from nb_accelerate.training.bigmodel.sizes import convert_file_size_to_int  # which imports torch
    from nb_accelerate.training.rehearsal.rank import rehearse_ranks

    capacity, *speeds = _DEVICES.get((device or "").upper(), (0, 0, 0))
    if memory is not None:
        capacity = convert_file_size_to_int(memory)
    if device is not None and not capacity:
        raise ConfigError(
            f"device={device!r} is none of {', '.join(_DEVICES)}. Give its memory too: memory='24GB'.",
            options=("device", "memory"),
        )
    options: dict[str, Any] = {"devices": "cpu", "progress": "off", "timeout": 2 * _SECONDS, "engine": "auto"}
    with tempfile.TemporaryDirectory(prefix="nb_accelerate-rehearsal-") as folder:
        job = (function, topologies, folder, _SECONDS, device or "", int(capacity))
        (traces,) = notebook_launcher(rehearse_ranks, job, 1, **options, **of_launch)
    return Rehearsal(tuple(traces), num_processes, _SECONDS, device or "", int(capacity), (speeds[0], speeds[1]))


def rehearse_cell(function: Callable[[], None], *, wants_accelerator: bool, **options: Any) -> Rehearsal:
    """Rehearse a cell, as a function, with the names that ranks give to cells; `run_rehearsal` has the options."""
    from nb_accelerate.training.rehearsal.rank import run_cell

    return run_rehearsal(functools.partial(run_cell, function, wants_accelerator), **options)
