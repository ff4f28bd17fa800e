"""The time limit itself."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_inner(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    pytester.makepyfile(
        f"""
        import time, pytest

        @pytest.mark.limit(0.3)
        def test_inner():
            def a_function_with_a_name():
                {body}
            a_function_with_a_name()

        def test_after():
            pass
        """
    )
    options = [
        "-p",
        "fixtures.limits",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={TESTS}",
        "-o",
        "markers=limit",
    ]
    return pytester.runpytest_subprocess(*options)


def test_a_test_past_its_limit_fails_with_its_stacks_and_the_next_one_runs(pytester: pytest.Pytester) -> None:
    result = run_inner(pytester, "time.sleep(30)")
    result.assert_outcomes(failed=1, passed=1)
    result.stderr.fnmatch_lines(["*in a_function_with_a_name*"])
    result.stdout.fnmatch_lines(["*ran past its limit of 0.3 s*"])


def test_a_test_stuck_in_c_code_ends_the_run_with_its_stacks(pytester: pytest.Pytester) -> None:
    # A loop in C that never looks for signals: no Python signal handler can run.
    result = run_inner(pytester, "sum(range(10**13))")
    assert result.ret == 1
    result.stderr.fnmatch_lines(["*Timeout*", "*in a_function_with_a_name*"])
