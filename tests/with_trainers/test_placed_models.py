"""transformers and peft, with this package as ``accelerate``: models that a device map places, and adapters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PLACES = {"accelerate": [], "nb_accelerate": [str(HERE / "as_accelerate.py")]}

pytestmark = pytest.mark.limit(240)

Found = dict[str, Any]
"""What each case has computed, by its name; text if an error ended it."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What was found with each package."""
    folder = tmp_path_factory.mktemp("placed")
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    kept |= {"PYTHONPATH": str(HERE.parents[1]), "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    for package, before in PLACES.items():
        command = [sys.executable, *before, str(HERE / "placed_models.py"), str(folder / package)]
        # peft with accelerate writes files below the current folder, named as those on the disk from its root on.
        subprocess.run(command, env=kept, cwd=folder, timeout=200, check=True)
    return {
        package: {file.parent.name: json.loads(file.read_text()) for file in (folder / package).glob("*/found.json")}
        for package in PLACES
    }


@pytest.mark.parametrize("case", ["on_a_device", "adapter", "on_the_disk", "chosen_by_memory"])
def test_numbers_are_those_with_accelerate(found: dict[str, Found], case: str) -> None:
    ours = found["nb_accelerate"][case]
    assert not isinstance(ours, str), ours
    assert ours == found["accelerate"][case]


def test_an_adapter_is_loaded_into_a_model_on_the_disk(found: dict[str, Found]) -> None:
    ours = found["nb_accelerate"]["adapter_on_the_disk"]
    assert not isinstance(ours, str), ours
    assert "copy out of meta" in found["accelerate"]["adapter_on_the_disk"], "accelerate does it now"
