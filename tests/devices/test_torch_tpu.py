"""The row of torch_tpu: found by its package and the chips, told what it wants before ranks start."""

from __future__ import annotations

from pathlib import Path

import pytest

from nb_accelerate.base.devices import find_kind, tpu

PACKAGE = """
import os, sys, types
import torch
def set_tpu_launch_env(*, nproc_per_node):
    os.environ["TORCH_TPU_TOPOLOGY"] = "2,2,1"
    os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in range(nproc_per_node))
    if nproc_per_node == 3:
        raise ValueError("three do not fit")
for name in ("torch.tpu", "torch.tpu.distributed"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch.tpu"].distributed = sys.modules["torch.tpu.distributed"]
sys.modules["torch.tpu.distributed"].set_tpu_launch_env = set_tpu_launch_env
print("libtpu not found.")
"""


@pytest.fixture
def four_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four chips and a package that does what torch_tpu documents."""
    (tmp_path / "torch_tpu").mkdir()
    (tmp_path / "torch_tpu" / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tpu, "num_chips", lambda: 4)
    tpu._launch_variables.cache_clear()


def test_it_is_found_with_its_package_and_chips(four_chips: None, monkeypatch: pytest.MonkeyPatch) -> None:
    row = find_kind("tpu")
    assert row is not None
    assert row.find(None, False) == ("0", "1", "2", "3")
    assert row.is_available()
    assert row.backend is not None
    assert row.backend.name == "tpu_dist"
    monkeypatch.setattr(tpu, "num_chips", lambda: 0)
    assert not row.is_available()


def test_without_its_package_chips_are_left_to_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "num_chips", lambda: 4)
    assert tpu.TPU.find(None, False) == ()


@pytest.mark.slow
def test_ranks_are_told_what_torch_tpu_sets_and_the_notebook_is_left_as_it_is(four_chips: None) -> None:
    told = [tpu.TPU.pin(("0", "1", "2", "3"), rank) for rank in range(4)]
    addresses = "localhost:0,localhost:1,localhost:2,localhost:3"
    assert told == [{"TORCH_TPU_TOPOLOGY": "2,2,1", "TORCH_TPU_SLICEBUILDER_ADDRESSES": addresses}] * 4
    assert tpu.TPU.pin(("0",), 0) == {}
    with pytest.raises(OSError, match="3 processes: ValueError: three"):
        tpu.TPU.pin(("0", "1", "2"), 0)
