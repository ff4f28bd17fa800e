"""Benchmarks are run by hand, so a change of the package may break one unnoticed: their quick parts run here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_the_benchmark_of_the_panel_writes_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench_panel = importlib.import_module("bench_panel")
    monkeypatch.setattr(bench_panel, "_nanoseconds", lambda action, number=1: action() or 0.0)

    lines = bench_panel._writing()

    assert any("all nine writes of a step" in line for line in lines)
