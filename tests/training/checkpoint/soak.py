"""Runs that are killed at random instants and go on by themselves, compared with one that was left alone: `make soak`.

Usage: soak.py RUNS [SEED]
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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


def undisturbed(where: Path) -> list[list[list[object]]]:
    """Return what a run leaves that nobody disturbs: see `_outcome`."""
    process = _start(where, in_background=False)
    out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, err
    return _outcome(where, out)


def disturbed(where: Path, victim: str, delay: float, *, in_background: bool) -> list[list[list[object]]]:
    """Return the same of a run in which somebody is killed.

    Args:
        where: an empty folder.
        victim: one of `VICTIMS`.
        delay: seconds from the moment all ranks have begun.
        in_background: whether it saves while training goes on.
    """
    process = _start(where, in_background=in_background)
    try:
        deadline = time.monotonic() + LONGEST
        while len(files := sorted(where.glob("rank *"))) < RANKS or not all(file.read_text() for file in files):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay)  # the random instant
        pids = [int(file.read_text()) for file in files]
        chosen = {"a rank": pids[1:], "the main rank": pids[:1], "all ranks": pids, "the kernel": [process.pid]}
        for pid in chosen[victim]:
            with contextlib.suppress(ProcessLookupError):  # it was done
                os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=LONGEST)
        if victim == "the kernel":
            for file in files:
                file.unlink()
            process = _start(where, in_background=in_background, resume=True)
            out, err = process.communicate(timeout=LONGEST)
        assert process.returncode == 0, err
    finally:
        process.kill()
        process.communicate()
    found = checkpoints(where, read=True)
    newest = max(found, key=lambda one: int(one.folder.name.rpartition("_")[2]))
    assert newest.is_whole, found
    return _outcome(where, out)


def _start(where: Path, *, in_background: bool, resume: bool = False) -> subprocess.Popen[str]:
    where.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PROGRAM), str(where), str(RANKS), "1 step", "--pause", "0.02"]
    if in_background:
        command.append("--async")
    if resume:
        command.append("--resume")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _outcome(where: Path, out: str) -> list[list[list[object]]]:
    """Return, for each rank, the rows and losses of all steps in order, and a fingerprint of what it had at the end."""
    ends = json.loads(out.splitlines()[-1])
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
    began = time.monotonic()
    expected = undisturbed(where / "undisturbed")
    most = min(time.monotonic() - began, 3.0)
    for number in range(runs):
        victim = VICTIMS[number % len(VICTIMS)]
        in_background = bool(number // len(VICTIMS) % 2)
        delay = random_.uniform(0, most)
        told = f"seed {seed}, run {number}: {victim}, {delay:.3f} s, in_background={in_background}"
        try:
            got = disturbed(where / f"run {number}", victim, delay, in_background=in_background)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(told) from error
        assert got == expected, told
        print(told, "went on", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16, Path(folder))
