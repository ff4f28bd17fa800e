"""What the README says of this package beside others that run a function on two processes, measured by hand.

    python tests/benchmarks/beside.py              what is in this environment
    PYTHON tests/benchmarks/beside.py lightning    with a Python that has lightning
    PYTHON tests/benchmarks/beside.py ray          with a Python that has ray[train]

With Ray Train 2.60 the workers did not start on the machine of the README.

Each case is a program of its own, as a notebook's kernel would run it, with a limit of `_LIMIT` seconds.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

_LIMIT = 60

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
        say(f"{started + seconds:.2f} s")
        """,
    "the next ones": """
        timed(meets)
        say(f"{sorted(timed(meets)[0] for _ in range(5))[2]:.3f} s")
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
    command = [sys.executable, "-c", program]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return f"nothing within {_LIMIT} s"
    said = [line.removeprefix("SAID ") for line in ran.stderr.splitlines() if line.startswith("SAID ")]
    return said[0] if said else f"exit {ran.returncode}: {ran.stderr[-300:]}"


def main() -> None:
    """Measure the tools that are named, or those that need no other environment."""
    for tool in sys.argv[1:] or ("nb_accelerate", "accelerate", "ipyparallel"):
        print(tool)
        for case in CASES:
            print(f"  {case}: {measure(tool, case)}", flush=True)


if __name__ == "__main__":
    main()
