"""Exceptions that misbehave when somebody asks about them: type, line and traceback are told all the same."""

from __future__ import annotations

import builtins
import os
import random
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.kernels import Kernel
from fixtures.ranks import RunRanks

from nb_accelerate import notebook_launcher
from nb_accelerate.notebook.diagnostics.render import render_report
from nb_accelerate.notebook.ranks.failing.errors import error_of, summary
from nb_accelerate.notebook.ranks.failing.incidents import Incident, IncidentKind, Wording
from nb_accelerate.notebook.ranks.request import Request
from nb_accelerate.notebook.worker.call import fail

CLASSES = """
import sys

class StrRaises(Exception):
    def __str__(self): raise RuntimeError("no text")

class StrExits(Exception):
    def __str__(self): sys.exit(3)

class StrIsNoText(Exception):
    def __str__(self): return 5

class ReprRaises(Exception):
    def __repr__(self): raise KeyboardInterrupt

class ReduceRaises(Exception):
    def __reduce__(self): raise KeyboardInterrupt

class ReduceExits(Exception):
    def __reduce__(self): sys.exit(3)

class ReduceIsOdd(Exception):
    def __reduce__(self): return (print, ())

class NotesAreNone(Exception):
    __notes__ = None

class NoteRaises(Exception):
    def __init__(self, *args):
        super().__init__(*args)
        self.__notes__ = [StrRaises(), "a good note"]

class CannotBeSet(Exception):
    def __setattr__(self, name, value): raise RuntimeError("read only")

class Endless(Exception):
    def __str__(self): return str(self)

class UnpicklesOnlyOnce(Exception):
    def __init__(self, one, two): super().__init__(one)

HOSTILE = [one for one in list(globals().values()) if isinstance(one, type)]

def make(kind):
    return kind("one", "two") if kind is UnpicklesOnlyOnce else kind("text")

def fails(kind):
    raise make(kind)

def fails_at_length():
    raise ValueError("start" + "x" * 10**8 + "end")
"""

CLASS_SPACE: dict[str, Any] = {"__name__": "hostile"}
exec(compile(CLASSES, "hostile.py", "exec"), CLASS_SPACE)
make = CLASS_SPACE["make"]


class Programs:
    """Random exceptions: of hostile classes, with causes and contexts that go in circles, groups and notes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: list[BaseException] = []

    def error(self, depth: int = 0) -> BaseException:
        kind = self.random.choice(["hostile", "plain", "exit", "group" if sys.version_info >= (3, 11) else "plain"])
        if kind == "hostile":
            made = make(self.random.choice(CLASS_SPACE["HOSTILE"]))
        elif kind == "exit":
            made = SystemExit(self.random.choice(["\u00b2", "--5", "5", 7, "-3", None, 2.5, 10**5000]))
        elif kind == "group" and depth < 3:
            made = builtins.BaseExceptionGroup(
                "several", [self.error(depth + 1) for _ in range(self.random.randint(1, 3))]
            )
        else:
            made = ValueError(self.random.choice(["text", "x" * 100_000, "\ud800", "", "a\nb", b"\xff", {"a": 1}]))
        self.made.append(made)
        for name in ("__cause__", "__context__"):
            if self.random.random() < 0.4:
                other = self.random.choice(self.made)
                vars(BaseException)[name].__set__(made, other)
        return made


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


class TestGenerated:
    @pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 4000), marks=pytest.mark.slow)])
    def test_every_exception_is_told_of_with_its_type_and_line(self, seeds: range):
        rank: Any = SimpleNamespace(rank=1, label="1")
        for seed in seeds:
            error = raised(Programs(seed).error())
            name = type(error).__qualname__
            try:
                failure, packed = fail(error)
                assert failure.report.type_name == name
                assert failure.report.frames[-1].name == "raised"
                assert len(repr(failure)) < 3_000_000
                answer = (failure, tuple(map(os.dup, packed.fds)) if packed else ())
                request = Request(ranks=[], send=lambda _: None, steps=(), wording=Wording(), world_size=2)
                request.answers[1] = answer
                request.incidents.append(Incident(kind=IncidentKind.FAILED, when=0.0, rank=rank, failure=answer))
                cause = error_of(request)
                assert cause is not None
                assert name in render_report(failure.report, title="rank 1 of 2")
                assert summary(cause)
            except BaseException as wrong:
                pytest.fail(f"seed {seed}, {name}: {type(wrong).__name__}: {wrong}")


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%distributed start -n 1").ok()
    shared_kernel.run(CLASSES).ok()
    shared_kernel.run("def leaves(code):\n    sys.exit(code)").ok()
    shared_kernel.run("from nb_accelerate import notebook_launcher").ok()
    return shared_kernel


NAMES = sorted(one.__qualname__ for one in CLASS_SPACE["HOSTILE"])


class TestCells:
    def test_a_pool_keeps_its_variables_whatever_is_raised(self, notebook: Kernel):
        # Defined there: not all of them can travel.
        notebook.run(f"%%distributed --progress off\n{CLASSES}\nkept = 11").ok()
        for name in NAMES:
            cell = notebook.run(f"%%distributed --progress off\nfails({name})")
            assert cell.error in (name, "RemoteError", "KeyboardInterrupt"), name
            assert name in cell.traceback, cell.traceback
            assert "in fails" in cell.traceback, cell.traceback
        notebook.run("class Value:\n    def __reduce__(self): sys.exit(3)").ok()
        cell = notebook.run("%%distributed --progress off --out got\nValue()")
        assert "ShippingError" in cell.traceback
        assert notebook.run("%%distributed --progress off\nprint(kept)").ok().stdout == "11\n"

    def test_an_exit_code_may_be_any_text(self, notebook: Kernel):
        for code in ("\u00b2", "--5"):
            cell = notebook.run(f"%%distributed --progress off\nsys.exit({code!r})")
            assert cell.error == "RemoteError"
            assert f"SystemExit: {code}" in cell.message

    def test_exceptions_of_a_group_are_listed(self, notebook: Kernel):
        if sys.version_info < (3, 11):
            pytest.skip("exception groups came with Python 3.11")
        cell = notebook.run(
            "%%distributed --progress off\nraise ExceptionGroup('two', [KeyError('first'), ReduceExits('second')])"
        )
        assert "ExceptionGroup: two (2 sub-exceptions)" in cell.traceback.replace("\x1b[31m", "").replace("\x1b[0m", "")
        assert "first" in cell.traceback
        assert "second" in cell.traceback


class TestLaunches:
    @pytest.mark.parametrize(
        ("method", "name"),
        [
            ("forkserver", "StrExits"),
            ("forkserver", "ReduceExits"),
            ("forkserver", "NotesAreNone"),
            ("fork", "ReduceExits"),
        ],
    )
    def test_the_type_and_the_line_are_told(self, notebook: Kernel, method: str, name: str):
        cell = notebook.run(f"notebook_launcher(fails, ({name},), 1, start_method={method!r}, progress='off')")
        assert cell.error in (name, "RemoteError"), cell.traceback
        assert name in cell.traceback
        assert "in fails" in cell.traceback

    @pytest.mark.parametrize("code", ["\u00b2", "--5"])
    def test_an_exit_code_may_be_any_text(self, notebook: Kernel, code: str):
        cell = notebook.run(f"notebook_launcher(leaves, ({code!r},), 1, progress='off')")
        assert cell.error == "RankDiedError"
        assert f"sys.exit({code})" in cell.message

    def test_a_text_of_a_hundred_megabytes_is_cut(self, notebook: Kernel):
        cell = notebook.run("notebook_launcher(fails_at_length, (), 1, progress='off')", timeout=30.0)
        assert cell.error == "ValueError"
        assert cell.message.startswith("startxxx")
        assert cell.message.endswith("xxxend")
        assert "99,980,108 characters" in cell.message
        assert len(cell.traceback) < 200_000


def test_an_exit_while_an_error_is_handled_is_told_without_that_error() -> None:
    try:
        try:
            int("x")
        except ValueError:
            sys.exit(2)  # as argparse does when it has explained what is wrong
    except SystemExit as error:
        failure, packed = fail(error)
    assert packed is not None
    packed.close()
    shown = render_report(failure.report, title="rank 0")
    assert "SystemExit: 2" in shown
    assert "ValueError" not in shown


def test_an_exception_whose_arguments_are_very_long_stays_of_its_type(run_ranks: RunRanks) -> None:
    def fail() -> None:
        raise AssertionError(bytes(10 << 20))

    with pytest.raises(AssertionError, match="characters are left out"):
        run_ranks(fail)


def test_a_result_that_is_asked_for_again_raises_with_no_more_frames() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    launch = notebook_launcher(fail, (), 1, block=False, progress="off")

    def num_frames() -> int:
        with pytest.raises(ValueError, match="on purpose") as caught:
            launch.result(60)
        return len(traceback.extract_tb(caught.value.__traceback__))

    assert len({num_frames() for _ in range(4)}) == 1
