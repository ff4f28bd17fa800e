"""The leak check itself: each kind of thing, left behind by a test, fails that test and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

LEAKS = {
    "process": ("subprocess.Popen(['sleep', '20'])", "processes:"),
    "thread": (
        "threading.Thread(target=time.sleep, args=(20,), daemon=True, name='stray').start()",
        "threads: stray",
    ),
    "descriptor": ("os.open('/dev/null', os.O_RDONLY)", "descriptors:"),
    "socket": ("KEPT.append(socket.socket())", "descriptors:"),
    "file": ("open(os.path.join(tempfile.gettempdir(), 'stray'), 'w').close()", "files:"),
    "shared memory": (
        "open('/dev/shm/nb_accelerate_stray', 'w').close()",
        "shared_memory: nb_accelerate_stray",
    ),
    "variable": ("os.environ['NB_STRAY'] = '1'", "environment: NB_STRAY=1"),
    "changed variable": ("os.environ.pop('HOME')", "(changed or gone)"),
}


def run_inner(pytester: pytest.Pytester, line: str, marker: str = "") -> pytest.RunResult:
    pytester.makepyfile(
        f"""
        import os, socket, subprocess, tempfile, threading, time, pytest
        KEPT = []

        {marker}
        def test_inner():
            {line}
        """
    )
    plugins = ["-p", "fixtures.leaks", "-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}"]
    return pytester.runpytest_subprocess(*plugins, "-o", "markers=may_leave")


@pytest.fixture(autouse=True)
def _sweep() -> None:
    yield
    Path("/dev/shm/nb_accelerate_stray").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", LEAKS)
def test_a_test_that_leaves_something_behind_fails_and_names_it(pytester: pytest.Pytester, kind: str) -> None:
    line, named = LEAKS[kind]
    result = run_inner(pytester, line)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*{named}*"])


def test_a_test_that_leaves_nothing_passes(pytester: pytest.Pytester) -> None:
    run_inner(pytester, "subprocess.run(['true'], check=True)").assert_outcomes(passed=1)


def test_what_a_test_leaves_on_purpose_is_not_held_against_it(pytester: pytest.Pytester) -> None:
    result = run_inner(pytester, "os.environ['NB_STRAY'] = '1'", "@pytest.mark.may_leave('environment')")
    result.assert_outcomes(passed=1)


def test_what_a_fixture_of_wider_scope_keeps_is_not_held_against_a_test_and_all_else_is(
    pytester: pytest.Pytester,
) -> None:
    keep = (
        "import psutil, fixtures.leaks; "
        "kept = subprocess.Popen(['sh', '-c', 'sleep 20 & wait']); "
        "KEPT.append(fixtures.leaks.lasting([psutil.Process(kept.pid)])); "
        "KEPT[-1].__enter__()"
    )
    run_inner(pytester, keep).assert_outcomes(passed=1)
    result = run_inner(pytester, f"{keep}; subprocess.Popen(['sleep', '21'])")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*processes:*sleep 21*"])
    assert "sleep 20" not in result.stdout.str()
