"""`nb-accelerate launch`: run a script or a notebook on all devices, from a terminal."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.file import CONFIG_FILE, KEYS, NO_FILE
from nb_accelerate.base.config.variables import DEEPSPEED, DYNAMO, FSDP, GENERAL, MESH, USE_MESH, USES, variables_of
from nb_accelerate.cli.flags import GROUPS, add_flags
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.base.config.file import ConfigFile
    from nb_accelerate.notebook.worker.script import Job

# Values of ``distributed_type`` that a launch can be for.
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "FSDP", "DEEPSPEED", "XLA")

# Flags that few scripts have themselves, unlike ``--mixed_precision``.
_OF_LAUNCHERS_ONLY = ("--num_processes", "--num-processes", "--multi_gpu", "--multi-gpu", "--nproc_per_node")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="run a script or a notebook on all devices",
        usage="nb-accelerate launch [FLAGS] TARGET [ARGUMENTS OF THE TARGET]",
        description="Run a script in one process for each GPU, or in as many as you say; or a notebook, from top to "
        "bottom in a new kernel. Flags of this command stand before the target; what follows it is the target's. Flags "
        "may be written with dashes too (--num-processes). What no flag says is looked up in the environment "
        "(ACCELERATE_...), then in the file that `nb-accelerate config` writes.",
        epilog="A notebook is not changed: the executed copy is NAME.executed.ipynb, complete up to the cell that "
        "failed or was interrupted. Ctrl-C interrupts; twice, it kills. The exit code is that of the script, 1 after "
        "an exception, 2 for a wrong command line, 130 after Ctrl-C.",
    )
    parser.add_argument("target", metavar="TARGET", help="script.py, notebook.ipynb, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    add_flags(parser)
    _add_notebook_flags(parser.add_argument_group("notebooks"))
    parser.set_defaults(run=_run)


def _add_notebook_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument("--output-dir", type=Path, metavar="DIR", help="where to write (default: this folder)")
    group.add_argument("--html", action="store_true", default=None, help="also write the page NAME.html")
    group.add_argument(
        "-p",
        "--parameter",
        action="append",
        metavar="NAME=VALUE",
        help="another value of a name in the cell with the tag 'parameters'; again for more",
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.target.endswith(".ipynb") and not (arguments.module or arguments.no_python):
        return _run_notebook(arguments)
    for name in ("output_dir", "html", "parameter"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for notebooks, but {arguments.target!r} is none.")
    misplaced = next((word for word in arguments.arguments if word.partition("=")[0] in _OF_LAUNCHERS_ONLY), None)
    if misplaced is not None and not arguments.quiet:
        target = arguments.target
        print(f"{misplaced} stands after {target}, which gets it. Flags of launch stand before it.", file=sys.stderr)
    job = _job(arguments)
    from nb_accelerate.base.config.file import name_unknown, read_config
    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.cli.flags import errors_in_flags
    from nb_accelerate.notebook.launch.plan import make_plan

    file = read_config(arguments.config_file) or NO_FILE
    if not arguments.quiet and name_unknown(file):
        print(name_unknown(file), file=sys.stderr)
    _refuse_engine(arguments.target, file)
    chosen = launch_options(arguments, file)
    with errors_in_flags():
        function, args = job.call
        if arguments.rehearse:
            return _rehearse(job, chosen, arguments.rehearse_device, arguments.rehearse_memory)
        options = LaunchOptions(function=function, args=args, **chosen)
        from nb_accelerate.notebook.launch.machine import facts_here

        facts = facts_here(options.env)
        if arguments.multi_gpu and not facts.num_gpus:
            raise ConfigError("--multi_gpu asks for GPUs, and none is visible here. To train on the CPU: --cpu")
        # Nothing is in memory here that a fork would share, and the server of ranks has torch imported.
        plan = make_plan(options, facts, may_copy=False)
        from nb_accelerate.notebook.launch.servers import warm_up_for

        warm_up_for(plan.method)  # it imports torch while this process imports the rest
        from nb_accelerate.cli.script import run

        return run(job, options, plan)


def _refuse_engine(target: str, file: ConfigFile) -> None:
    from nb_accelerate.base.config.engine import VARIABLES
    from nb_accelerate.base.config.env import Environment

    variable = VARIABLES["engine"]
    in_environment = Environment(os.environ).text(variable)
    engine = (in_environment or file.section("engine_config").get("engine", "auto")).lower()
    if engine != "auto":
        source = variable if in_environment else file.path
        raise ConfigError(
            f"engine={engine!r}, from {source}, is for notebooks, and the ranks of a script "
            f"are on this machine. Write {variable}=auto nb-accelerate launch {target}. For several machines, start it "
            "on each with --num_machines"
        )


def _rehearse(job: Job, chosen: dict[str, Any], device: str | None, memory: str | None) -> int:
    """Rehearse a script as it would be launched, and return 1 if it would not come to its end."""
    if job.kind == "program":
        raise ConfigError(f"{job.target} is a program of any kind. --rehearse is for scripts and modules of Python.")
    from nb_accelerate.rehearsing import run_rehearsal

    machines = chosen["num_nodes"]
    of_launch = {name: chosen[name] for name in ("env", "mixed_precision")}
    if chosen["num_processes"] is not None:
        of_launch["num_processes"] = chosen["num_processes"] * machines
    function, args = job.call
    bound = functools.partial(function, *args)
    rehearsal = run_rehearsal(bound, num_machines=machines, device=device, memory=memory, **of_launch)
    print(rehearsal)
    return 0 if rehearsal.ok else 1


def _job(arguments: argparse.Namespace) -> Job:
    from nb_accelerate.notebook.worker.script import Job

    if arguments.module and arguments.no_python:
        raise ConfigError("-m and --no_python were both given: the target is a module, or a program. Leave one out.")
    kind = "module" if arguments.module else "program" if arguments.no_python else "script"
    if kind == "script":
        path = Path(arguments.target)
        if path.is_dir():
            raise ConfigError(f"launch was given the folder {str(path)!r}. Name the script in it.")
        if not path.is_file():
            raise ConfigError(f"launch was given {str(path)!r}, but there is no such file in {Path.cwd()}.")
    elif kind == "program" and shutil.which(arguments.target) is None:
        raise ConfigError(f"launch was given the program {arguments.target!r}, but none of that name can be run here.")
    return Job(target=arguments.target, arguments=tuple(arguments.arguments), kind=kind)


def launch_options(arguments: argparse.Namespace, file: ConfigFile) -> dict[str, Any]:
    """Return the options of a launch from flags, and from the configuration file where there is no flag.

    Environment variables come between the two; an `Accelerator` reads them in the ranks, as it always does.
    """
    from nb_accelerate.base.config.env import Environment
    from nb_accelerate.base.config.parallelism import resolve_parallelism

    engine = chosen_engine(arguments, file)
    flags = {name: value for name, value in vars(arguments).items() if value is not None}
    settings = replace(file, values={**file.values, **flags})
    num_machines, total = _choose_machines(settings)
    num_processes = None if total is None else total // num_machines
    devices = _choose_devices(arguments, settings, engine, num_processes)
    variables = rank_variables(arguments, file, engine)
    layout = resolve_parallelism(None, None, Environment({**os.environ, **variables}))
    if layout is not None and total is not None:
        layout.check_ranks(total)
    return {
        "num_processes": num_processes,
        "devices": devices,
        "mixed_precision": arguments.mixed_precision or "no",
        "num_nodes": num_machines,
        "rdzv_conf": _pairs(arguments.rdzv_conf),
        "max_restarts": arguments.max_restarts or 0,
        "monitor_interval": 0.1 if arguments.monitor_interval is None else arguments.monitor_interval,
        "timeout": arguments.timeout,
        "progress": "off" if arguments.quiet else "auto",
        "env": variables,
        **_choose_rendezvous(arguments, settings, num_machines),
    }


def _choose_machines(settings: ConfigFile) -> tuple[int, int | None]:
    """Return the number of machines, and of processes on all of them together; None where that is not said."""
    num_machines = KEYS["num_machines"]("num_machines", settings.get("num_machines", 1))
    num_machines = 1 if num_machines == -1 else num_machines  # accelerate's value for "not set", as below
    total = settings.get("num_processes", -1)
    if total == -1:
        return num_machines, None
    if total % num_machines:
        raise ConfigError(
            f"num_processes={total} cannot be shared out equally to num_machines={num_machines}. Write a multiple of "
            f"{num_machines}: it counts the processes on all machines together."
        )
    return num_machines, total


def _choose_devices(
    arguments: argparse.Namespace, settings: ConfigFile, engine: str, num_processes: int | None
) -> str | list[int] | None:
    """Return ``devices`` of a launch: None for those that this machine has."""
    given_flags = [flag for flag in ("cpu", "tpu", "multi_gpu", "gpu_ids") if getattr(arguments, flag)]
    if len(given_flags) > 1 and given_flags[0] in ("cpu", "tpu"):
        raise ConfigError(f"--{given_flags[0]} and --{given_flags[1]} were both given. Leave one of them out.")
    kind = settings.get("distributed_type", "NO")
    if kind not in _KINDS and not (arguments.cpu or arguments.multi_gpu or engine):
        raise ConfigError(
            f"distributed_type: {kind}, in {settings.path}, is for hardware or an engine that "
            f"this package does not know. Write one of {', '.join(_KINDS)}, or a flag such as --multi_gpu or --cpu"
        )
    gpu_ids = KEYS["gpu_ids"]("gpu_ids", settings.get("gpu_ids", "all"))
    if engine == "XLA" and not arguments.cpu:
        return "xla"
    if arguments.cpu or (not given_flags and (settings.get("use_cpu") or kind == "MULTI_CPU")):
        return "cpu"
    return None if gpu_ids == "all" else [int(number) for number in gpu_ids.split(",")][:num_processes]


def _choose_rendezvous(arguments: argparse.Namespace, settings: ConfigFile, num_machines: int) -> dict[str, Any]:
    """Return the options that say which machine this is, and where all of them meet."""
    from nb_accelerate.base.topology.master_address import node_in_step

    is_said = arguments.machine_rank is not None or arguments.main_process_ip is not None
    slurm_step = None if is_said else node_in_step(os.environ, num_machines)  # which knows both
    rank, address = slurm_step or (settings.get("machine_rank", 0), settings.get("main_process_ip"))
    port, backend = settings.get("main_process_port"), settings.get("rdzv_backend", "static")
    options = {"node_rank": rank, "rdzv_backend": backend}
    if num_machines > 1 and address and backend == "c10d":
        host = f"[{address}]" if ":" in address else address
        return {**options, "rdzv_endpoint": f"{host}:{port or 29500}", "rdzv_id": Path(arguments.target).name}
    if num_machines > 1 and address:
        options["master_addr"] = address
    return {**options, "use_port": port}


def _pairs(text: str | None) -> dict[str, str] | None:
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(equals and key for key, equals, _ in pairs):
        raise ConfigError(f"--rdzv_conf {text!r} is not a list such as join_timeout=60,last_call_timeout=2.")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _run_notebook(arguments: argparse.Namespace) -> int:
    flag = next((flag.name for group in GROUPS for flag in group.flags if getattr(arguments, flag.name)), None)
    if flag is not None:
        raise ConfigError(
            f"a notebook starts its own ranks: leave out --{flag}, and write in its cell: "
            "notebook_launcher(train, num_processes=2)."
        )
    # Flags of notebooks may stand behind it too.
    parser: argparse.ArgumentParser = type(arguments.command)(prog=arguments.command.prog)
    _add_notebook_flags(parser)
    parser.set_defaults(**{name: value for name, value in vars(arguments).items() if value is not None})
    parser.parse_args(arguments.arguments, namespace=arguments)
    path = Path(arguments.target)
    if not path.is_file():
        raise ConfigError(f"launch was given {str(path)!r}, but there is no such file in {Path.cwd()}.")
    # Where JupyterLab is installed, jsonschema builds a parser for IRIs with it, which takes two seconds. Notebooks
    # have no field of that format.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    from nb_accelerate.cli import notebook

    values = notebook.read_parameters(arguments.parameter or ())
    change = partial(notebook.set_parameters, values=values) if values else None
    run = notebook.execute(path, progress=sys.stdout, change=change)
    folder = arguments.output_dir or Path()
    written = [notebook.write_notebook(run, folder)]
    if arguments.html:
        written.append(notebook.write_page(run, folder))
    for file in written:
        print(f"wrote {file}")
    if run.failure is not None:
        print(run.failure.render(color=sys.stderr.isatty() and "NO_COLOR" not in os.environ), file=sys.stderr)
    if run.interrupted:
        return 128 + signal.SIGINT
    return 0 if run.failure is None else 1


# Flags that ask for an engine, and the word for it in a configuration file.
_SWITCHES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "tpu": "XLA"}

# Variables of the ranks by the flag that sets them.
_VARIABLES = {
    **GENERAL,
    **FSDP,
    **DEEPSPEED,
    **DYNAMO,
    **MESH,
    "use_fsdp": USES["FSDP"],
    "use_deepspeed": USES["DEEPSPEED"],
    "use_parallelism_config": USE_MESH,
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}


def chosen_engine(arguments: argparse.Namespace, file: ConfigFile) -> str:
    """Return ``FSDP``, ``DEEPSPEED`` or ``XLA`` if flags ask for it, or else the file; "" for none of them."""
    switches = [name for name in (*_SWITCHES, "multi_gpu") if getattr(arguments, name)]
    if len(switches) > 1:
        raise ConfigError(f"--{switches[0]} and --{switches[1]} were both given. Leave one of them out.")
    engine = ""
    if switches:
        engine = _SWITCHES.get(switches[0], "")
    elif file.get("distributed_type") in _SWITCHES.values():
        engine = file.get("distributed_type")
    for group in GROUPS:
        is_on = not group.switch or getattr(arguments, group.switch) or _SWITCHES.get(group.switch) == engine
        flag = next((flag.name for flag in group.flags if getattr(arguments, flag.name, None) is not None), None)
        if flag is not None and not is_on:
            raise ConfigError(
                f"--{flag} is for --{group.switch}, which was not given. Add --{group.switch}, or leave it out."
            )
    path = arguments.deepspeed_config_file
    if path is not None and not path.is_file():
        raise ConfigError(f"--deepspeed_config_file {str(path)!r}: there is no such file.")
    return engine


def rank_variables(arguments: argparse.Namespace, file: ConfigFile, engine: str) -> dict[str, str]:
    """Return the variables of the ranks. Flags come before the environment, the environment before the file."""
    flags = {name: value for name, value in vars(arguments).items() if value is not None}
    environment = {name for name, value in os.environ.items() if value.strip()}
    # What the file says of an engine depends on the precision, which a flag may have changed.
    precision: dict[str, Any] = {name: flags[name] for name in ("mixed_precision", "downcast_bf16") if name in flags}
    of_file = file.general_variables() | replace(file, values={**file.values, **precision}).engine_variables(engine)
    variables = {name: value for name, value in of_file.items() if name not in environment}
    if file is not NO_FILE and ("config_file" in flags or CONFIG_FILE not in environment):
        variables[CONFIG_FILE] = str(file.path.absolute())
    if arguments.multi_gpu or arguments.gpu_ids:
        variables[GENERAL["use_cpu"]] = "false"
    if arguments.multi_gpu or any(getattr(arguments, name) for name in _SWITCHES):
        variables |= _disabled_engines(file, engine, set(USES.values()) if arguments.multi_gpu else environment)
    return variables | variables_of(flags, _VARIABLES)


def _disabled_engines(file: ConfigFile, engine: str, enabled: set[str]) -> dict[str, str]:
    """Return variables that disable what the file, or one of the ``enabled`` variables, asks for beside ``engine``."""
    # Ranks read the file as a fallback, so disable the engine that the file enables but the flags replaced.
    enabled = {USES.get(file.get("distributed_type", ""), ""), *enabled}
    variables = {name: "false" for word, name in USES.items() if word != engine and name in enabled}
    if engine != "FSDP" and file.section("parallelism_config"):
        variables[USE_MESH] = "false"
    return variables
