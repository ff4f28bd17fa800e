"""What a notebook does to its whole process does not stop launches and cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel

pytestmark = pytest.mark.slow

ACTS = {
    # What somebody writes, and what undoes it.
    "socket.setdefaulttimeout(0.05)": "socket.setdefaulttimeout(None)",
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)": "signal.signal(signal.SIGCHLD, signal.SIG_DFL)",
    "signal.signal(signal.SIGTERM, lambda *_: None)": "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "sys.setrecursionlimit(200)": "sys.setrecursionlimit(3000)",
    "warnings.simplefilter('error')": "warnings.resetwarnings()",
    "logging.disable(logging.CRITICAL)": "logging.disable(logging.NOTSET)",
    "logging.basicConfig(level=logging.DEBUG, force=True)": "logging.root.handlers.clear(); logging.root.setLevel(30)",
    "old = sys.stdout; sys.stdout = io.StringIO()": "sys.stdout = old",
    "torch.set_default_dtype(torch.float16)": "torch.set_default_dtype(torch.float32)",
    "torch.set_default_device('meta')": "torch.set_default_device(None)",
    "mode = torch.inference_mode(); mode.__enter__()": "mode.__exit__(None, None, None)",
    "torch.set_grad_enabled(False)": "torch.set_grad_enabled(True)",
    "torch.use_deterministic_algorithms(True)": "torch.use_deterministic_algorithms(False)",
    "mask = os.umask(0o777)": "os.umask(mask)",
    "os.environ.clear()": "os.environ.update(environ)",
    "sys.argv = []": "sys.argv = ['notebook']",
    "sys.path.clear()": "sys.path[:] = path",
    "asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())": "asyncio.set_event_loop_policy(None)",
    "print = len = open = None": "del print, len, open",
    "gc.disable()": "gc.enable()",
    "locale.setlocale(locale.LC_ALL, 'C')": "locale.setlocale(locale.LC_ALL, '')",
    "sys.excepthook = sys.displayhook = None": "sys.excepthook, sys.displayhook = hooks",
    "threading.stack_size(1 << 20)": "threading.stack_size(0)",
    "multiprocessing.set_start_method('spawn', force=True)": "multiprocessing.set_start_method(None, force=True)",
    "random.seed = None": "import importlib; importlib.reload(random)",
}
PREPARE = """
import asyncio, gc, io, locale, logging, multiprocessing, os, random, signal, socket, sys, threading, warnings
import torch
from nb_accelerate import notebook_launcher
environ, path, hooks = dict(os.environ), list(sys.path), (sys.excepthook, sys.displayhook)
def total():
    import os
    return int(os.environ["RANK"]) + 40
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run(PREPARE).ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


@pytest.mark.may_leave("processes", "files")  # the ranks of the shared kernel
@pytest.mark.parametrize("act", ACTS)
def test_a_launch_and_a_cell_run_all_the_same(notebook: Kernel, act: str) -> None:
    notebook.run(f"{act};").ok()
    try:
        launched = notebook.run(
            "found = notebook_launcher(total, num_processes=2, progress='off', start_method='forkserver')"
        )
        cell = notebook.run("%%distributed --out values\ntotal()")
        notebook.run("%distributed stop")
    finally:
        notebook.run(f"{ACTS[act]};").ok()
    assert (launched.error, cell.error) == (None, None), f"{launched.message} {cell.message}"
    assert notebook.run("[found, list(values)]").ok().value == "[[40, 41], [40, 41]]"
