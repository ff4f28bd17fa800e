"""Launches on two devices: those of `launch/test_gpus.py`, and which rank has which device."""

from __future__ import annotations

import pytest
from launch.test_gpus import (  # noqa: F401
    notebook,
    test_a_kernel_that_used_a_gpu_launches_without_a_restart,
    test_a_tensor_on_a_device_comes_back_on_the_cpu_and_the_gpu_stays_untouched,
    test_asking_for_a_fork_after_a_gpu_was_used_is_refused_with_what_to_write,
    test_every_gpu_gets_a_rank_forked_from_a_kernel_that_did_not_touch_it,
    test_more_ranks_than_gpus_are_refused_and_the_cpu_can_be_asked_for,
)

pytestmark = pytest.mark.usefixtures("simgpu")
