"""What is worth a sentence: the interface of the findings. Each has a file here; `state.py` has their list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import Ranks


class Finding:
    """Something that is told of the ranks of a run, when it is so."""

    while_on = True  # it is told while the run is on
    at_end = True  # it is told of a run that has ended
    is_advice = False  # it says what to try, and is no sign that something is wrong

    def observe(self, ranks: Ranks, now: float) -> None:
        """Take the newest samples of the ranks."""

    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        """Return what to tell the user; nothing if all is well."""
        raise NotImplementedError


class RankWarnings(Finding):
    """The warnings on the progress pages, each once."""

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        return list(dict.fromkeys(rank.sample.warning for rank in ranks.values() if rank.sample.warning))
