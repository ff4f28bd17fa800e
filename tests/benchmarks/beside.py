"""The table of the README: this package beside others that run a function on two processes, measured by hand.

    PYTHON tests/benchmarks/beside.py                   all of them, three rounds
    PYTHON tests/benchmarks/beside.py ray --rounds 1    one of them, once

PYTHON has `pip install accelerate ipyparallel lightning 'ray[train]'` beside this package.

Each case is a program of its own, as a notebook's kernel would run it. The tools take turns, round after round, and the
best time of each is printed: what else the machine does makes times longer, never shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import uuid
from importlib.metadata import version

import psutil

_LIMIT = 60
_LIMITS = {"ray": 240}
"""Seconds after which a case counts as hanging. A launch of Ray Train takes up to 30."""

LAUNCH = {
    "nb_accelerate": """
        from nb_accelerate import notebook_launcher
        def launch(function):
            return notebook_launcher(function, num_processes=2, devices="cpu", progress="off")
        """,
    "accelerate": """
        import os, socket
        os.environ["ACCELERATE_USE_CPU"] = "true"
        from accelerate import notebook_launcher
        def launch(function):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            return notebook_launcher(function, num_processes=2, use_port=str(port))
        """,
    "lightning": """
        import os, warnings
        warnings.simplefilter("ignore")
        from lightning.fabric import Fabric
        def launch(function):
            def run(fabric):
                os.environ["RANK"] = str(fabric.global_rank)
                return function()
            return Fabric(accelerator="cpu", devices=2, strategy="ddp_notebook").launch(run)
        """,
    "ipyparallel": """
        import os, socket
        import ipyparallel, logging
        cluster = ipyparallel.Cluster(n=2, log_level=logging.ERROR)
        began = time.perf_counter()
        client = cluster.start_and_connect_sync()
        view = client[:]
        started = time.perf_counter() - began
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        def place(rank, port):
            import os
            os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        for rank in (0, 1):
            client[rank].apply_sync(place, rank, port)
        view.use_cloudpickle().get()
        def launch(function):
            return view.apply_sync(function)
        """,
    "ray": """
        import logging
        import ray
        from ray.train import ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
        began = time.perf_counter()
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        started = time.perf_counter() - began
        def launch(function):
            def loop():
                function()
            scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})
            return TorchTrainer(loop, torch_config=TorchConfig("gloo"), scaling_config=scaling).fit()
        """,
}

BEGIN = """
import os, signal, sys, time
started = 0.0
{launch}
def meets():
    import torch
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
def rank():
    import os
    return int(os.environ["RANK"])
def fails():
    return {{"train": 1}}["test"] if rank() == 1 else meets()
def killed():
    import os, signal
    meets()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return meets()
def multiplies():
    import torch
    return (torch.ones(1500, 1500) @ torch.ones(1500, 1500)).sum().item()
def timed(function):
    began = time.perf_counter()
    value = launch(function)
    return time.perf_counter() - began, value
"""

CASES = {
    "the first result, with starting": """
        seconds, _ = timed(meets)
        say(f"{started + seconds:.3f} s")
        """,
    "the next ones": """
        timed(meets)
        say(f"{min(timed(meets)[0] for _ in range(3)):.3f} s")
        """,
    "what comes back": "say(repr(timed(meets)[1])[:70])",
    "after a matrix product in the notebook": """
        multiplies()
        timed(multiplies)
        say("works")
        """,
    "a KeyError on rank 1 arrives as": """
        try:
            timed(fails)
        except BaseException as error:
            lines = str(error).splitlines()
            say(f"{type(error).__name__} ({len(lines)} lines): {lines[0][:60] if lines else ''}")
        """,
    "rank 1 is killed": """
        timed(meets)
        began = time.perf_counter()
        try:
            timed(killed)
        except BaseException as error:
            text = str(error).splitlines()[0][:90] if str(error) else ""
            say(f"after {time.perf_counter() - began:.1f} s: {type(error).__name__}: {text}")
        """,
}

END = "\nos._exit(0)\n"


def measure(tool: str, case: str) -> str:
    """Run one case, and return what it says."""
    prepare = "def say(text):\n    print('SAID', text, file=sys.__stderr__, flush=True)\n"
    begin = BEGIN.format(launch=textwrap.dedent(LAUNCH[tool]))
    program = begin + prepare + textwrap.dedent(CASES[case]) + END
    limit = _LIMITS.get(tool, _LIMIT)
    mark = {"BESIDE_CASE": uuid.uuid4().hex}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **mark}
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"nothing within {limit} s"
        finally:
            _end_all(mark)
        errors.seek(0)
        printed = errors.read()
    said = [line.removeprefix("SAID ") for line in printed.splitlines() if line.startswith("SAID ")]
    return said[0] if said else f"exit {code}: {printed[-300:]}"


def _end_all(mark: dict[str, str]) -> None:
    """End the processes of a case, also those that have left its session: engines of ipyparallel, daemons of Ray."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark.items() <= process.environ().items():
                process.kill()


def best(answers: list[str]) -> str:
    """The shortest of several times; the last answer, if it is no time."""
    times = [float(answer[:-2]) for answer in answers if re.fullmatch(r"[\d.]+ s", answer)]
    return f"{min(times):.3f} s" if times else answers[-1]


def main() -> None:
    """Measure the tools that are named, or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", nargs="*", default=list(LAUNCH))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(", ".join(f"{tool} {version(tool)}" for tool in ("torch", *arguments.tools)))
    for case in CASES:
        print(case)
        answers: dict[str, list[str]] = {tool: [] for tool in arguments.tools}
        for round_number in range(arguments.rounds):
            for tool, said in answers.items():
                if round_number == 0 or (said[-1].endswith(" s") and not said[-1].startswith("nothing")):
                    said.append(measure(tool, case))
        for tool, said in answers.items():
            print(f"  {tool}: {best(said)}", flush=True)


if __name__ == "__main__":
    main()
