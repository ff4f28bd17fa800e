"""Tests that need DeepSpeed, torchao or bitsandbytes: `make test-deepspeed` runs them; else they are not collected.

The folder is not called `deepspeed`: tests/ is on the path of modules, where it would stand for the library.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nb_accelerate.training.process import context

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _nothing_is_known_yet():
    context.reset()
