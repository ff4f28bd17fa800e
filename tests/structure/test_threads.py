"""Every thread that the package starts tells what it has failed with."""

from __future__ import annotations

import ast
from pathlib import Path

from structure.layers import tree_of

PACKAGE = Path(__file__).parents[2] / "nb_accelerate"

ALLOWED = {
    "base/helper_threads.py": {"Thread"},
    # It runs what a helper thread does.
    "notebook/worker/stack_writer.py": {"start_new_thread"},
    # Whoever has submitted something to a pool asks for its result.
    "training/bigmodel/mapped.py": {"ThreadPoolExecutor"},
    "training/checkpoint/checksums.py": {"ThreadPoolExecutor"},
    "training/checkpoint/placing.py": {"ThreadPoolExecutor"},
}
STARTING = {"Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "ThreadPool", "to_thread", "run_in_executor"}


def test_threads_are_helper_threads() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(tree_of(file)))
        used = [node.func for node in nodes if isinstance(node, ast.Call)]
        used += [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
        if starting := {ast.unparse(one).rpartition(".")[2] for one in used} & STARTING:
            found[file.relative_to(PACKAGE).as_posix()] = starting
    assert found == ALLOWED
