"""Runs suites that ask for the CPU on simgpu: a plugin of pytest, and in ranks an entry point of ``torch.backends``.

Suites of tests/training write ``Accelerator(cpu=True)``, as they do not depend on the machine they run on. Where this
module is loaded, ``cpu=True`` says nothing, and the device is chosen as for a user who writes ``Accelerator()``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nb_accelerate.training.process.context import ProcessContext

USES = "SIMGPU_USES"
"""Environment variable: the file to which a process adds a byte for each `Accelerator` on simgpu."""

NOT_OF_THE_DEVICE = ("sparse", "nested")
"""Kinds of batches: torch has no way to move these tensors to a device that is registered from outside."""


def load() -> None:
    """Let ``cpu=True`` say nothing in this process."""
    from nb_accelerate.training.process import setup

    as_asked = setup.setup_process

    def on_device(**options: Any) -> ProcessContext:
        process = as_asked(**{**options, "cpu": None})
        if process.device.type == "simgpu":
            with Path(os.environ[USES]).open("ab") as uses:
                uses.write(b".")
        return process

    setup.setup_process = on_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from fixtures.batch_kinds import KINDS

    for kind in NOT_OF_THE_DEVICE:
        KINDS.pop(kind)
    for item in items:
        item.add_marker("gpu")  # else a test is hidden the devices
        item.add_marker(pytest.mark.may_leave("shared_memory"))  # that of other tests, which run at the same time


@pytest.fixture(autouse=True)
def _uses(record_property: Any) -> Iterator[None]:
    """Note in the report of each test how often the device was used."""
    file = Path(os.environ[USES])
    before = file.stat().st_size
    yield
    record_property("uses", file.stat().st_size - before)
