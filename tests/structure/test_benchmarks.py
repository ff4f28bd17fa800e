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

    assert any("nine writes" in line for line in lines)


def test_a_ratio_that_is_a_fifth_worse_than_that_of_the_last_release_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    page = importlib.import_module("page")
    sections = {
        "cells": ["a small all_reduce, beside ipyparallel", "  nb_accelerate    9.00 x  (0.001 s)"],
        "checkpoints": ["1 rank   save    0.01 (processors 1.11) of accelerate, 0.67 until durable  (1.10 s)"],
        "new": ["what the page does not have   7.00 x"],
    }
    marked = [line.split()[-1] for line in page.beside_release(sections) if "WORSE" in line]
    assert marked == ["nb_accelerate"]
    assert len(page.beside_release(sections)) == 2
    again = sections["cells"][1].replace("9.00", "0.01")
    assert "WORSE" not in "".join(page.beside_release({"cells": [*sections["cells"], again]}))
