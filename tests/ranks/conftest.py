"""A loop over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nb_accelerate.notebook.ranks.loop import RankLoop


@pytest.fixture
def loop() -> Iterator[RankLoop]:
    one = RankLoop()
    yield one
    one.close()
