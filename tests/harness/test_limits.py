"""The time limit itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.limits import PATIENCE

TESTS = Path(__file__).parents[1]


def run_inner(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    """Run a test of one line, and another. The line brings forward one of the limits, which are far away."""
    pytester.makepyfile(
        f"""
        import faulthandler, signal, time, pytest

        how = {{}}
        start_watch = faulthandler.dump_traceback_later
        def start_watch_and_keep_how(seconds, **options):
            how.update(options)
            start_watch(seconds, **options)
        faulthandler.dump_traceback_later = start_watch_and_keep_how

        @pytest.mark.limit(30)
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
    result = run_inner(pytester, "signal.setitimer(signal.ITIMER_REAL, 0.05); [time.sleep(0.01) for _ in range(3000)]")
    result.assert_outcomes(failed=1, passed=1)
    result.stderr.fnmatch_lines(["*in a_function_with_a_name*"])
    result.stdout.fnmatch_lines([f"*ran past its limit of {PATIENCE * 30:g} s*"])


def test_a_test_stuck_in_c_code_ends_the_run_with_its_stacks(pytester: pytest.Pytester) -> None:
    # A loop in C that never looks for signals: no Python signal handler can run.
    result = run_inner(pytester, "start_watch(0.05, **how); sum(range(10**13))")
    assert result.ret == 1
    result.stderr.fnmatch_lines(["*Timeout*", "*in a_function_with_a_name*"])
