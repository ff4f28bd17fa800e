"""transformers and peft, with this package as ``accelerate``: models that a device map places, and adapters."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from with_trainers.beside import computed

pytestmark = [
    pytest.mark.limit(240),
    # transformers imports hooks before it places anything.
    pytest.mark.skipif(find_spec("nb_accelerate.hooks") is None, reason="nb_accelerate.hooks is not written yet"),
]


@pytest.mark.parametrize("case", ["on_a_device", "adapter", "on_the_disk", "chosen_by_memory"])
def test_numbers_are_those_with_accelerate(case: str, tmp_path: Path) -> None:
    assert computed("nb_accelerate", case, tmp_path / "ours") == computed("accelerate", case, tmp_path / "theirs")


def test_an_adapter_is_loaded_into_a_model_on_the_disk(tmp_path: Path) -> None:
    assert computed("nb_accelerate", "adapter_on_the_disk", tmp_path / "ours")
    with pytest.raises(AssertionError, match="Cannot copy out of meta tensor"):  # accelerate has nothing to copy
        computed("accelerate", "adapter_on_the_disk", tmp_path / "theirs")
