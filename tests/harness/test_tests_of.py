"""``make tests-of``."""

import sys

import pytest
import tests_of

# Its ranks are forked, and do not start as interpreters.
ON_RANKS = "tests/pool/test_cells.py::TestOutput::test_figures_and_html_arrive"


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_test_goes_through_what_its_ranks_call_and_not_through_what_is_only_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(tests_of, "CALLS", tmp_path / "calls")
    tests_of.record([sys.executable, "-m", "pytest", "-n", "0", f"--basetemp={tmp_path / 'base'}", ON_RANKS])
    assert tests_of.tests_of("notebook/worker/cell.py") == [ON_RANKS]
    assert tests_of.tests_of("training/accelerator/__init__.py") == []
