"""What goes wrong in a cell of ranks on devices loses nothing: tests of `pool/test_failures.py` on two devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from pool.test_failures import (  # noqa: F401
    TestDeath,
    TestExceptions,
    TestInterrupts as Interrupts,
    _variables_stay_and_ranks_are_in_step,
    notebook,
)

pytestmark = pytest.mark.usefixtures("simgpu")


@pytest.fixture(scope="module")
def ranks(simgpu: Mapping[str, str]) -> int:
    return 2


class TestInterrupts:
    """What is different where ranks wait for each other on devices."""

    test_an_interrupt_ends_the_cell_on_all_ranks = Interrupts.test_an_interrupt_ends_the_cell_on_all_ranks
