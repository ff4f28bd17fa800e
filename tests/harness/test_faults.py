"""The faults that `tests/faults.py` puts into the package."""

from __future__ import annotations

from pathlib import Path

from faults import places, read_rows

ROOT = Path(__file__).parents[2]


def test_each_fault_has_its_place_in_the_package_and_its_tests() -> None:
    rows = read_rows()
    assert [(name, old) for name, old, _, _ in rows if len(places(name, old)) != 1] == []
    assert [test for _, _, _, tests in rows for test in tests if not (ROOT / test).exists()] == []
