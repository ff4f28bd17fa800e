"""TPUs are found by variables and files, without torch_xla."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

from nb_accelerate.base.devices import xla


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The PCI bus of a machine with torch_xla and eight chips of a TPU v5e, beside other things."""
    cards = [("0x1ae0", "0x0063")] * 8 + [("0x1ae0", "0x001f"), ("0x10de", "0x0063")]
    for number, (vendor, device) in enumerate(cards):
        folder = tmp_path / f"0000:00:{number:02x}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    monkeypatch.setattr(xla, "_BUS", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    return tmp_path


@pytest.mark.parametrize(
    ("variable", "number"), [(None, 8), ("TPU", 8), ("CPU", 1), ("cpu", 1), ("CUDA", 0), ("NEURON", 0)]
)
def test_devices_are_those_of_the_runtime_that_is_named(bus: Path, variable: str | None, number: int) -> None:
    assert len(xla.XLA.find(variable, False)) == number


@pytest.mark.parametrize(("bounds", "number"), [("2,2,1", 4), ("1,1,1", 1), ("4,4,4", 8), ("a", 8), ("", 8)])
def test_bounds_of_processes_limit_them(bus: Path, bounds: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_PROCESS_BOUNDS", bounds)
    assert len(xla.XLA.find("TPU", False)) == number


def test_without_chips_there_is_what_the_variable_promises(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla, "_BUS", bus / "empty")
    assert xla.XLA.find(None, False) == ()
    assert xla.XLA.find("TPU", False) == ("0",)


def test_without_torch_xla_there_is_nothing(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert xla.XLA.find("TPU", False) == ()
    assert not xla.XLA.is_available()


def test_a_runtime_that_holds_chips_is_told_from_one_on_the_cpu(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (xla.XLA.in_use(), xla.XLA.held()) == ("", "")

    class Extension:
        @staticmethod
        def _xla_runtime_is_initialized() -> bool:
            return True

    class TorchXLA:
        _XLAC = Extension

    monkeypatch.setitem(sys.modules, "torch_xla", TorchXLA)  # type: ignore[arg-type]
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert "XLA runtime" in xla.XLA.in_use()
    assert xla.XLA.held() == ""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert "holds the TPU until" in xla.XLA.held()
