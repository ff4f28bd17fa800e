"""`nb-accelerate test`: check that distributed training works on this machine, as configured."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from nb_accelerate.cli.flags import GROUPS, HOW_TO_RUN, add_flags

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "test",
        help="check that distributed training works here",
        description="Start the processes that `launch` would start, and check in them, one after the other: ranks, "
        "collectives, loaders, training against one process, checkpoints. The exit code is 0 if all is well.",
    )
    add_flags(parser, without=HOW_TO_RUN)
    silent = {flag.name: None for group in GROUPS if group.title == HOW_TO_RUN for flag in group.flags}
    parser.set_defaults(run=_run, target="test", **silent)


def _run(arguments: argparse.Namespace) -> int:
    from nb_accelerate.base.config.file import NO_FILE, read_config
    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.cli.checks import run_checks
    from nb_accelerate.cli.flags import errors_in_flags
    from nb_accelerate.cli.launch import launch_options
    from nb_accelerate.cli.script import tell
    from nb_accelerate.notebook.launch.launch import Launch
    from nb_accelerate.notebook.launch.machine import facts_here
    from nb_accelerate.notebook.launch.plan import make_plan
    from nb_accelerate.notebook.ranks.output.sinks import StreamSink

    file = read_config(arguments.config_file) or NO_FILE
    chosen = launch_options(arguments, file)
    # A machine without several GPUs shows the most with two processes.
    if chosen["num_processes"] is None and not facts_here(chosen["env"]).num_gpus:
        chosen["num_processes"] = 2
    with errors_in_flags():
        options = LaunchOptions(function=run_checks, **{**chosen, "timeout": 300.0})
        plan = make_plan(options, facts_here(chosen["env"]), may_copy=False)
    print(plan.describe() + (f" (from {file.path})" if file is not NO_FILE else ""), flush=True)
    began = time.monotonic()
    try:
        values = Launch(options, plan, StreamSink(), name="nb-accelerate test").run()
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        tell(error)
        print(f"the test failed: {error}", file=sys.stderr)
        return 1
    print(f"all {values[0]} checks passed in {time.monotonic() - began:.1f} s")
    return 0
