"""What ranks warn of by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.display.findings.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.display.rank_history import Ranks


class RankWarnings(Finding):
    """The warnings on the progress pages, each once."""

    @override
    def sentences(self, ranks: Ranks, now: float) -> Sequence[str]:
        return list(dict.fromkeys(rank.sample.warning for rank in ranks.values() if rank.sample.warning))
