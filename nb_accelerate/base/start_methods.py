"""How the processes of ranks come to be, as a table.

A start method is one row of `START_METHODS`, and a file for what the row names. What runs is named and not imported: it
belongs to the notebook half.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a start method depends on."""

    device: str  # as users call it, such as ``"CUDA"``
    is_host: bool  # ranks compute on the processor
    in_use: str = ""  # why a rank forked from this process could not use its device
    forbids_fork: str = ""  # why the runtime of the device does not survive any fork


@dataclass(frozen=True, kw_only=True)
class StartMethod:
    """One row."""

    name: str
    # ``module:function`` that makes a context manager with the `RankServer` of `LaunchOptions`; "" for the method that
    # runs its one rank in this process, which ``"auto"`` does not choose.
    starter: str = ""
    device: str = ""  # torch's name of the only type of device that it is for
    forks: bool = False  # ranks are forked from a process that has imported torch
    # That process is the notebook. Its data is shared, so that nothing is pickled. Ranks have one intra-op thread,
    # because they inherit the state of OpenMP without its threads.
    copies_notebook: bool = False
    max_ranks: int | None = None  # on one machine
    max_nodes: int | None = None

    @property
    def is_inline(self) -> bool:
        """Whether its one rank is this process."""
        return not self.starter

    @property
    def serves_cells(self) -> bool:
        """Whether ranks may stay for the cells of a notebook. A copy of it would be out of date with the next cell."""
        return not self.is_inline and not self.copies_notebook

    def obstacle(self, conditions: Conditions) -> str:
        """Return why it cannot work, or ""."""
        if self.device not in ("", conditions.device.lower()):
            return f"it starts ranks on {self.device.upper()} devices, and these are to run on {conditions.device}"
        return conditions.in_use if self.copies_notebook else ""


_STARTERS = "nb_accelerate.notebook.launch.placing"

_FORK = f"{_STARTERS}:fork"

# By name, in the order in which ``"auto"`` tries them.
START_METHODS: dict[str, StartMethod] = {
    method.name: method
    for method in (
        StartMethod(name="xla", starter=_FORK, device="xla", forks=True, copies_notebook=True, max_nodes=1),
        StartMethod(name="fork", starter=_FORK, forks=True, copies_notebook=True),
        StartMethod(name="forkserver", starter=f"{_STARTERS}:forkserver", forks=True),
        StartMethod(name="spawn", starter=f"{_STARTERS}:spawn"),
        StartMethod(name="inline", max_ranks=1, max_nodes=1),
    )
}


def choose_method(conditions: Conditions, *, may_copy: bool = True) -> tuple[StartMethod, str]:
    """Choose the first start method that suits, as ``"auto"`` does.

    Returns:
        The method, and why this one; "" where it is what one expects.
    """
    reason = ""
    for method in START_METHODS.values():
        if not method.starter or method.device not in ("", conditions.device.lower()):
            continue
        # After a large operation here, a forked rank that computes on the processor would hang.
        if method.copies_notebook and (conditions.is_host or not may_copy):
            continue
        why_not = (conditions.forbids_fork if method.forks else "") or method.obstacle(conditions)
        if not why_not:
            shares = f"{conditions.device} is untouched here, so data in memory is shared"
            return method, shares if method.copies_notebook else reason
        reason = why_not
    raise AssertionError("no start method of the table works everywhere")
