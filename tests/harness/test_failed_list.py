"""The list of failed tests, and what `.ci/run` makes of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


def run_inner(pytester: pytest.Pytester, body: str, workers: int = 0) -> list[str]:
    """Run tests with ``FAILED_TESTS`` set; return the lines that were written."""
    pytester.makepyfile(inner=body)
    file = pytester.path / "build" / "failed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAILED_TESTS", str(file))
        pytester.runpytest_subprocess(
            "inner.py",
            "-n",
            str(workers),
            "-p",
            "fixtures.failed",
            "-p",
            "no:cacheprovider",
            "-o",
            f"pythonpath={TESTS}",
        )
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_failures_in_every_phase_of_a_test_are_listed_once(pytester: pytest.Pytester, workers: int) -> None:
    listed = run_inner(
        pytester,
        """
        import pytest

        @pytest.fixture
        def broken_at_the_end():
            yield
            raise RuntimeError

        @pytest.mark.parametrize("word", ["a b", "c"])
        def test_call(word, broken_at_the_end):
            assert word == "c"

        def test_good():
            pass
        """,
        workers,
    )
    python, _ = listed[0].split("\t")
    assert (pytester.path / python).samefile(sys.executable)
    assert sorted(listed) == [f"{python}\tinner.py::test_call[a b]", f"{python}\tinner.py::test_call[c]"]


def test_a_run_that_is_cut_off_lists_nothing(pytester: pytest.Pytester) -> None:
    body = """
        import os

        def test_bad():
            assert False

        def test_that_ends_the_run():
            os._exit(1)
        """
    assert run_inner(pytester, body) == []


class Project:
    """A copy of `.ci/run` beside a Makefile whose targets run small tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
        (folder / "bin").mkdir()
        chromium = folder / "bin" / "chromium"  # it only has to be found
        chromium.write_text("#!/bin/sh\n")
        chromium.chmod(0o755)
        self.write_makefile()

    def write_makefile(self, **commands: str) -> None:
        """Write a Makefile with the targets of `.ci/run`.

        Args:
            **commands: what targets run, with ``_`` for ``-`` in their names; the others succeed.
        """
        script = (ROOT / ".ci" / "run").read_text().replace("\\\n", "")
        one_by_one = re.search(r"^for target in (.*?); do", script, re.MULTILINE)[1].split()
        at_once = shlex.split(re.search(r"^printf '\"%s\"\\n' (.*) \|$", script, re.MULTILINE)[1])
        targets = dict.fromkeys([*one_by_one, *(words.split()[0] for words in at_once)])
        lines = (f"{target}:\n\t@{commands.get(target.replace('-', '_'), 'true')}\n" for target in targets)
        (self.folder / "Makefile").write_text("".join(lines))

    def make_reruns_end_with(self, command: str, venv: str = ".venv") -> None:
        python = self.folder / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\necho "again: $3"\n{command}\n')
        python.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            ["bash", str(self.folder / ".ci" / "run")],
            env=environ,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )


FAIL_ONE = r"mkdir -p build; printf '.venv/bin/python\ttests/a.py::test_b[x y]\n' >> $$FAILED_TESTS; exit 1"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_ci_passes_when_every_target_does(project: Project) -> None:
    result = project.run()
    assert result.returncode == 0, result.stderr
    assert "FLAKY" not in result.stdout
    assert result.stdout.rstrip().endswith(" passed ===")


def test_ci_passes_and_names_a_test_that_passes_alone(project: Project) -> None:
    project.write_makefile(test=FAIL_ONE)
    project.make_reruns_end_with("exit 0")
    result = project.run()
    assert result.returncode == 0, result.stderr
    assert "again: tests/a.py::test_b[x y]" in result.stdout
    assert "=== make test-slow ===" in result.stdout
    assert result.stdout.rstrip().endswith("FLAKY tests/a.py::test_b[x y]")


def test_ci_fails_on_a_test_that_fails_alone_too(project: Project) -> None:
    project.write_makefile(test_slow=FAIL_ONE)
    project.make_reruns_end_with("exit 1")
    result = project.run()
    assert result.returncode == 1
    assert "FAILED TWICE tests/a.py::test_b[x y]" in result.stdout
    assert "FLAKY" not in result.stdout


@pytest.mark.parametrize(("venv", "target"), [(".venv-places/colab", "test_places"), (".venv-xla", "test_xla")])
def test_ci_reruns_a_test_in_the_environment_where_it_failed(project: Project, venv: str, target: str) -> None:
    project.write_makefile(**{target: FAIL_ONE.replace(".venv", venv)})
    project.make_reruns_end_with("exit 0", venv=venv)
    result = project.run()
    assert result.returncode == 0, result.stderr
    assert f"alone: tests/a.py::test_b[x y] ({venv}/bin/python)" in result.stdout
    assert result.stdout.rstrip().endswith("FLAKY tests/a.py::test_b[x y]")


def test_ci_fails_at_once_where_no_list_says_which_test_failed(project: Project) -> None:
    project.write_makefile(test="exit 1")
    result = project.run()
    assert result.returncode != 0
    assert "make test failed" in result.stdout
    assert "=== make test-slow ===" not in result.stdout


@pytest.mark.parametrize("target", ["lint", "docs", "test_places"])
def test_ci_fails_if_one_of_two_targets_that_are_made_at_once_fails(project: Project, target: str) -> None:
    project.write_makefile(**{target: "exit 1"})
    result = project.run()
    assert result.returncode != 0
    name = target.replace("_", "-")
    assert re.search(rf"^({name}.*): make \1 failed$", result.stdout, re.MULTILINE)
    assert "all of it passed" not in result.stdout
