"""Each test begins in a process that is not known to be anything yet."""

from __future__ import annotations

import pytest

from nb_accelerate.process import context


@pytest.fixture(autouse=True)
def _nothing_is_known_yet():
    """An `Accelerator` would take over the precision of the last one that another test made."""
    context.reset()
