"""What every test gets: a time limit, a leak check, real ranks, real kernels."""

import os
import signal
import sys

import IPython
from hypothesis import settings

# IPython 7 appends a folder that has a package named `tests`. Ranks import functions of tests by name.
sys.path[:] = [entry for entry in sys.path if not entry.startswith(IPython.__path__[0])]

# A module is compiled once, not by each rank and kernel.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# jsonschema, which nbformat imports, would build a parser with it for two seconds, in each worker of pytest-xdist.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# A job in the background, nohup and some runners of CI ignore it, and so would all kernels and ranks of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of torch sleep while they wait. By default they spin, which takes processor time from other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long an example took says how busy the machine was. All else is as hypothesis has it, here or in a CI.
settings.register_profile("without deadlines", parent=settings(), deadline=None)
settings.load_profile("without deadlines")

pytest_plugins = [
    "pytester",
    "fixtures.failed",
    "fixtures.limits",
    "fixtures.old_torch",
    "fixtures.devices",
    "fixtures.distributions",
    "fixtures.leaks",
    "fixtures.cost",
    "fixtures.calls",
    "fixtures.ranks",
    "fixtures.kernels",
    "fixtures.engines",
    "fixtures.hosts",
    "fixtures.sshd",
    "fixtures.slurm",
    "fixtures.users",
]
