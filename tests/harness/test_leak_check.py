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


def run_inner(
    pytester: pytest.Pytester, *lines: str, marker: str = "", settle: float = 0.2, workers: int = 0
) -> pytest.RunResult:
    """Run tests of one line each; what they leave is given `settle` seconds."""
    tests = (f"{marker}\ndef test_{number}():\n    {line}\n" for number, line in enumerate(lines))
    imports = "import os, socket, subprocess, tempfile, threading, time, pytest\nKEPT = []\n"
    pytester.makepyfile("\n".join((imports, *tests)))
    plugins = ["-p", "fixtures.devices", "-p", "fixtures.leaks", "-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}"]
    options = ["-n", str(workers), "-o", "markers=may_leave", "-o", f"leak_settle={settle}"]
    return pytester.runpytest_subprocess(*plugins, *options)


@pytest.fixture(autouse=True)
def _sweep() -> None:
    yield
    Path("/dev/shm/nb_accelerate_stray").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_test_that_leaves_something_behind_fails_and_names_it(pytester: pytest.Pytester) -> None:
    result = run_inner(pytester, *(line for line, _ in LEAKS.values()))
    result.assert_outcomes(passed=len(LEAKS), errors=len(LEAKS))
    _, *reports = result.stdout.str().split("ERROR at teardown of test_")
    for kind, report in zip(LEAKS, reports, strict=True):
        assert LEAKS[kind][1] in report, kind


@pytest.mark.slow
def test_shared_memory_that_several_workers_leave_fails_their_run(pytester: pytest.Pytester) -> None:
    leak, _ = LEAKS["shared memory"]
    result = run_inner(pytester, leak, "pass", workers=2)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["left behind in shared memory*nb_accelerate_stray*"])


@pytest.mark.slow
def test_a_test_that_leaves_nothing_passes(pytester: pytest.Pytester) -> None:
    nothing = "subprocess.run(['true'], check=True)"
    soon_gone = "threading.Timer(0.1, int).start()"
    run_inner(pytester, nothing, soon_gone, settle=20.0).assert_outcomes(passed=2)


@pytest.mark.slow
def test_what_a_test_leaves_on_purpose_is_not_held_against_it(pytester: pytest.Pytester) -> None:
    result = run_inner(pytester, "os.environ['NB_STRAY'] = '1'", marker="@pytest.mark.may_leave('environment')")
    result.assert_outcomes(passed=1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_process_that_one_test_leaves_fails_no_other(pytester: pytest.Pytester) -> None:
    nobody = "import psutil; assert psutil.Process().children() == []"
    result = run_inner(pytester, "subprocess.Popen(['sleep', '20'])", nobody)
    result.assert_outcomes(passed=2, errors=1)
