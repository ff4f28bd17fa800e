"""Tests of GPUs that other folders have run here on two devices of the type ``simgpu``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fixtures.devices import Gpus

pytest.register_assert_rewrite("launch.test_gpus", "pool.test_failures", "pool.test_gpus", "pool.test_random_numbers")


@pytest.fixture(scope="module")
def gpus(simgpu: Mapping[str, str]) -> Gpus:
    return Gpus(type="simgpu", backend="simccl", count=2, in_use="simgpu was used in this notebook")
