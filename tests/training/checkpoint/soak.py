"""Runs that are killed at random instants and go on by themselves, compared with one that was left alone: `make soak`.

Usage: soak.py RUNS [SEED]
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nb_accelerate import checkpoints

PROGRAM = Path(__file__).parent / "resumed_run.py"
VICTIMS = ("a rank", "the main rank", "all ranks", "the kernel")
RANKS = 2
LONGEST = 240.0  # seconds that a run may take on a busy machine


class Notebook:
    """A process that starts runs one after another. A new one takes its place if it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, where: Path, *, in_background: bool, resume: bool = False) -> subprocess.Popen[str]:
        """Start a run; returns the process."""
        where.mkdir(parents=True, exist_ok=True)
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, str(PROGRAM)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        run = [str(where), RANKS, "1 step", 0.02, in_background, resume]
        print(json.dumps(run), file=self._process.stdin, flush=True)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with self._process:
                self._process.kill()


def undisturbed(notebook: Notebook, where: Path) -> tuple[list[list[list[object]]], float]:
    """Return what a run leaves that nobody disturbs, see `_outcome`, and the seconds from its beginning to its end."""
    process = notebook.start(where, in_background=False)
    _begun(process, where)
    began = time.monotonic()
    return _outcome(where, _end(process)), time.monotonic() - began


def disturbed(
    notebook: Notebook, where: Path, victim: str, delay: float, *, in_background: bool
) -> list[list[list[object]]]:
    """Return the same of a run in which somebody is killed.

    Args:
        notebook: what starts it.
        where: an empty folder.
        victim: one of `VICTIMS`.
        delay: seconds from the moment all ranks have begun.
        in_background: whether it saves while training goes on.
    """
    process = notebook.start(where, in_background=in_background)
    files = _begun(process, where)
    time.sleep(delay)  # the random instant
    pids = [int(file.read_text()) for file in files]
    chosen = {"a rank": pids[1:], "the main rank": pids[:1], "all ranks": pids, "the kernel": [process.pid]}
    for pid in chosen[victim]:
        with contextlib.suppress(ProcessLookupError):  # it was done
            os.kill(pid, signal.SIGKILL)
    if victim == "the kernel":
        process.communicate(timeout=LONGEST)
        for file in files:
            file.unlink()
        process = notebook.start(where, in_background=in_background, resume=True)
    end = _end(process)
    found = checkpoints(where, read=True)
    newest = max(found, key=lambda one: int(one.folder.name.rpartition("_")[2]))
    assert newest.is_whole, found
    return _outcome(where, end)


def _begun(process: subprocess.Popen[str], where: Path) -> list[Path]:
    """Wait until all ranks have begun; returns the files with their processes."""
    deadline = time.monotonic() + LONGEST
    while len(files := sorted(where.glob("rank *"))) < RANKS or not all(file.read_text() for file in files):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return files


def _end(process: subprocess.Popen[str]) -> list[object]:
    """Wait for the end of a run; returns a fingerprint of what each rank had."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LONGEST)[0], f"no end within {LONGEST:g} s"
    line = process.stdout.readline()
    assert line, "the launch has failed"
    ends: list[object] = json.loads(line)
    return ends


def _outcome(where: Path, ends: list[object]) -> list[list[list[object]]]:
    """Return, for each rank, the rows and losses of all steps in order, and a fingerprint of what it had at the end."""
    outcome: list[list[list[object]]] = []
    for rank in range(RANKS):
        steps: dict[int, list[object]] = {}
        for line in (where / f"log {rank}").read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut off when its writer was killed
                step, *rest = json.loads(line)
                steps[step] = rest
        outcome.append([[step, *steps[step]] for step in sorted(steps)] + [[ends[rank]]])
    return outcome


def soak(runs: int, seed: int, where: Path) -> None:
    """Kill runs, and compare what they leave with what a run leaves that was left alone.

    Args:
        runs: how many; victims and ways of saving take turns.
        seed: of the instants.
        where: an empty folder.

    Raises:
        AssertionError: one differs, has left no whole checkpoint, or did not go on.
    """
    random_ = random.Random(seed)
    with contextlib.closing(Notebook()) as notebook:
        expected, seconds = undisturbed(notebook, where / "undisturbed")
        for number in range(runs):
            victim = VICTIMS[number % len(VICTIMS)]
            in_background = bool(number // len(VICTIMS) % 2)
            delay = random_.uniform(0, seconds)
            told = f"seed {seed}, run {number}: {victim}, {delay:.3f} s, in_background={in_background}"
            try:
                got = disturbed(notebook, where / f"run {number}", victim, delay, in_background=in_background)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                raise AssertionError(told) from error
            assert got == expected, told
            print(told, "went on", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16, Path(folder))
