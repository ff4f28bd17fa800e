"""What tests cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

INNER = """
import subprocess, sys
import pytest

BURN = "import time\\nwhile time.process_time() < 0.5: pass"

def test_dear():
    subprocess.run([sys.executable, "-c", BURN], check=True)

a_contract = pytest.mark.contract("a way")

@a_contract
def test_contract():
    subprocess.run([sys.executable, "-c", BURN], check=True)

@pytest.fixture(scope="module")
def shared():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_cheap(shared):
    pass

@pytest.mark.slow
def test_slow():
    pass
"""


@pytest.mark.slow
def test_a_test_of_ci_that_is_dearer_than_the_limit_fails_with_its_figure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest("import fixtures.cost\nfixtures.cost.LIMIT = 0.4")
    pytester.makepyfile(inner=INNER)
    costs = pytester.path / "costs"
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("COSTS_OF_TESTS", str(costs))
    plugins = ["-p", "fixtures.cost", "-p", "no:cacheprovider"]
    options = [*plugins, "-o", f"pythonpath={TESTS}", "-o", "markers=contract\nslow"]
    result = pytester.runpytest_subprocess("inner.py", "-m", "not slow and not browser", *options)
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_dear*", "It took ?.? processor seconds*"])
    result.stdout.fnmatch_lines(["fast: ? of 600 processor seconds, contracts ? of 150; dearest: *"])
    found = [json.loads(line) for line in costs.read_text().splitlines()]
    assert [name for name, _ in found] == [f"inner.py::test_{name}" for name in ("dear", "contract", "cheap")]
    assert 2 * found[2][1]["inner.py::test_cheap"] < found[2][1]["inner.py: shared"]
    result = pytester.runpytest_subprocess("inner.py", *options)  # where nothing says which tests are fast
    assert result.ret == 0
    result.stdout.fnmatch_lines(["fast: * of 600*", "slow: 0 processor seconds; dearest: *test_slow 0.0*"])
