"""The public ways that `make test` tries, however dear their tests are: each has one, which is marked with its row."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

CONTRACTS = {
    "a launch": (
        "values come back",
        "fork, forkserver, spawn",
        "inline",
        "an exception",
        "a killed rank",
        "after a matrix product",
        "an interrupt",
        "a deadline",
        "in the background",
        "restarts",
        "from a script",
        "from a terminal's IPython",
        "breakpoints",
        "a sweep",
    ),
    "cells": (
        "output of ranks",
        "figures",
        "variables stay",
        "names of the notebook",
        "pull",
        "status",
        "in the background",
        "auto",
        "an exception",
        "a killed rank is replaced",
        "an interrupt",
        "debug",
        "what a changed value of the notebook is on ranks",
        "--convert, numbers of one process",
        "--convert, in a notebook",
        "a kernel that is killed",
        "without torch",
    ),
    "commands": (
        "launch, a script",
        "launch, a notebook",
        "config",
        "env",
        "test",
        "status, stop",
        "estimate-memory",
        "merge-weights",
        "to-fsdp2",
    ),
    "training": (
        "DDP",
        "FSDP2",
        "strategies are saved and go on",
        "tensor parallel",
        "local SGD",
        "bf16",
        "fp16",
        "gathered evaluation",
        "stopped and saved from the notebook",
        "rows are dealt to ranks",
        "rows dispatched from rank 0",
        "models larger than memory",
    ),
    "checkpoints": (
        "a whole state",
        "those of accelerate",
        "other numbers of ranks",
        "in the background",
        "whole or not at all",
        "runs go on by themselves",
        "shards",
        "under way when a process ends",
    ),
    "trackers": (
        "JSON lines",
        "TensorBoard",
        "other libraries",
    ),
    "machines": (
        "a command",
        "ssh",
        "cells",
        "a lost one is named",
    ),
    "panel": (
        "widgets",
        "clicks",
        "lines",
        "runs",
    ),
    "README": ("its blocks",),
}


def test_each_contract_has_one_test_and_each_mark_a_contract():
    sources = "\n".join(file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))
    marked = re.findall(r'^ *@pytest\.mark\.contract\("(.+)"\)$', sources, re.MULTILINE)
    assert sorted(marked) == sorted(f"{way}: {what}" for way, whats in CONTRACTS.items() for what in whats)
