"""Cells on two devices: those of `pool/test_gpus.py`, and what travels between kernel and ranks."""

from __future__ import annotations

import pytest
from pool.test_gpus import (  # noqa: F401
    notebook,
    test_every_gpu_has_a_rank_with_a_group_even_if_it_is_alone,
    test_ranks_that_came_apart_meet_again_with_their_variables_and_models,
)

pytestmark = pytest.mark.usefixtures("simgpu")
