"""Ranks that are threads of one process, on two devices, with XLA's own collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("two_cores_checks.py")

_SECONDS = 60
"""For one run, which takes about ten. Collectives of XLA on its CPU device break off after ten seconds of waiting."""


@pytest.mark.limit(150)
@pytest.mark.parametrize("check", ["gathers_seven_rows", "averages_gradients_once", "shuffles_as_one"])
def test_each_of_two_threads_is_a_rank(check: str) -> None:
    said = ""
    for _ in range(2):  # threads of XLA's CPU device may miss each other, and the process is aborted then
        try:
            run = subprocess.run(
                [sys.executable, str(CHECKS), check], check=False, capture_output=True, text=True, timeout=_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            said = f"not done after {_SECONDS} s: {error.stderr!r}"
            continue
        if run.returncode == 0:
            return
        said = run.stderr
        if "AssertionError" in said:
            break
    pytest.fail(said)
