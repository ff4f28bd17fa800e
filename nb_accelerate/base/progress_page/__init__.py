"""The progress page (a `ProgressPage`): shared memory in which a rank notes its progress and which the notebook reads.

::

    rank: one machine word per fact, overwritten in place --> shared page --> notebook: `read`, when it likes

Nothing is sent and nobody waits, so a write costs some tens of nanoseconds, and the page still says where a rank
was after it was killed. A word is written in one piece; a reader may see words of two steps side by side, never half
of one.
"""

from nb_accelerate.base.progress_page.facts import Activity, CodeLine, Collective, Phase, RankMemory
from nb_accelerate.base.progress_page.page import MAX_RECORD, ProgressPage, here, install
from nb_accelerate.base.progress_page.sample import Bar, PageReader, Sample

__all__ = [
    "MAX_RECORD",
    "Activity",
    "Bar",
    "CodeLine",
    "Collective",
    "PageReader",
    "Phase",
    "ProgressPage",
    "RankMemory",
    "Sample",
    "here",
    "install",
]
