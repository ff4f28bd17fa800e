"""Each test begins in a process that is not known to be anything yet."""

from __future__ import annotations

import sys

import pytest

from nb_accelerate.training.process import context, group


@pytest.fixture(autouse=True)
def _nothing_is_known_yet():
    """An `Accelerator` would take over the precision of the last one of another test, and accelerate refuse others."""
    context.reset()
    accelerate_state = sys.modules.get("accelerate.state")
    if accelerate_state is not None:
        accelerate_state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate_state.GradientState._reset_state()
    yield
    group.close()
