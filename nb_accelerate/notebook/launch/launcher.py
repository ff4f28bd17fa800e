"""``notebook_launcher``: run a function on every rank, from one cell."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from nb_accelerate.base.config.checks import shown, suggest
from nb_accelerate.base.config.env import LAUNCH, RESUME, SESSION_DEFAULTS, Environment
from nb_accelerate.base.config.file import default_path, read_config
from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.base.seam import training_half
from nb_accelerate.errors import UnknownArgumentError
from nb_accelerate.errors.traceback_lines import wants_full
from nb_accelerate.notebook.display.frontend import choose_front_end, is_in_kernel
from nb_accelerate.notebook.launch.cluster import Cluster
from nb_accelerate.notebook.launch.description import announce
from nb_accelerate.notebook.launch.launch import Launch
from nb_accelerate.notebook.launch.machine import facts_here, gpu_warnings
from nb_accelerate.notebook.launch.plan import make_plan
from nb_accelerate.notebook.launch.rendezvous import open_rendezvous
from nb_accelerate.notebook.launch.servers import warm_server
from nb_accelerate.notebook.launch.setup import rank_environ
from nb_accelerate.notebook.launch.values import Values
from nb_accelerate.notebook.ranks.failing.errors import RankTraceback
from nb_accelerate.notebook.ranks.output.guard import OutputGuard
from nb_accelerate.notebook.ranks.output.sinks import sink_here
from nb_accelerate.notebook.worker.groups import has_group
from nb_accelerate.notebook.worker.server.limits import explain_resource_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.base.config.engine import EngineOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.ranks.output.sinks import Sink


def warm_up_in_kernel() -> None:
    """Start the process that ranks are forked from, in a kernel: it imports PyTorch while the user writes the call."""
    # Called when `notebook_launcher` is imported. Another thread than the main one starts nothing, since the process
    # would end with it.
    if is_in_kernel() and Environment().keep_warm and threading.current_thread() is threading.main_thread():
        warm_server()


@overload
def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = ...,
    num_processes: int | None = ...,
    mixed_precision: str = ...,
    use_port: str | int | None = ...,
    master_addr: str = ...,
    node_rank: int = ...,
    num_nodes: int = ...,
    rdzv_backend: str = ...,
    rdzv_endpoint: str = ...,
    rdzv_conf: Mapping[str, Any] | None = ...,
    rdzv_id: str = ...,
    max_restarts: int = ...,
    monitor_interval: float = ...,
    log_line_prefix_template: str | None = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    start_method: str = ...,
    devices: str | Sequence[int] | None = ...,
    timeout: float | None = ...,
    block: Literal[True] = ...,
    progress: str = ...,
    env: Mapping[str, str] | None = ...,
    by_value: Sequence[ModuleType] = ...,
    fold_output: bool | None = ...,
    resume: bool = ...,
    engine: str | None = ...,
    hosts: str | Sequence[str] | None = ...,
    address: str | None = ...,
    command_template: str | None = ...,
    remote_python: str | None = ...,
) -> Values: ...


@overload
def notebook_launcher(function: Callable[..., Any], *args: Any, block: Literal[False], **options: Any) -> Launch: ...


def notebook_launcher(  # type: ignore[misc] # the second overload is short for the same arguments
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    start_method: str = "auto",
    devices: str | Sequence[int] | None = None,
    timeout: float | None = None,
    block: bool = True,
    progress: str = "auto",
    env: Mapping[str, str] | None = None,
    by_value: Sequence[ModuleType] = (),
    fold_output: bool | None = None,
    resume: bool = False,
    engine: str | None = None,
    hosts: str | Sequence[str] | None = None,
    address: str | None = None,
    command_template: str | None = None,
    remote_python: str | None = None,
    **others: Any,
) -> Values | Launch:
    """Run a function on every rank and return what each of them returned.

    Each rank is a process of its own, also if there is just one, so the notebook stays as it was: launch as often
    as you like. Functions and classes defined in cells, closures and lambdas are fine. What ranks print appears in
    the cell.

    Args:
        function: what to run. It makes its own `Accelerator()`.
        args: its positional arguments.
        num_processes: number of ranks on this machine; with an `engine` that on all machines together. None is what
            ``%distributed config`` has set in this notebook, or else what the configuration file says (see
            ``nb-accelerate config``); without both it is one for each TPU chip or GPU, or one on a machine without.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``: `Accelerator()`'s default in the ranks.
        use_port: port of the rendezvous store. None or 0 finds a free one; on several machines the default is 29500.
        master_addr: on several machines, the address of machine 0 as the others see it. With an `engine` addresses are
            tried where this is not given.
        node_rank: number of this machine, from 0. Run the same cell on each machine, with its own number.
        num_nodes: number of machines. All use the same `num_processes`. They meet at a port without authentication:
            keep it inside of a private network.
        rdzv_backend: who numbers several machines. ``"static"``: you do, by `node_rank`, and machine 0 has
            `master_addr`. ``"c10d"``: they do, as they come; give all of them the same `rdzv_endpoint` and `rdzv_id`.
        rdzv_endpoint: ``"HOST:PORT"`` where machines meet; with ``"static"`` instead of `master_addr` and `use_port`.
        rdzv_conf: ``{"join_timeout": 60}``, seconds to wait. With ``"c10d"`` also ``is_host``, where
            the endpoint is.
        rdzv_id: names this launch among others at the same endpoint.
        max_restarts: after a failure, start all ranks again, so many times; not after an error that would come back,
            such as a `ConfigError`. The count is in the environment variable ``TORCHELASTIC_RESTART_COUNT``.
        monitor_interval: seconds between two looks at what several machines have told. Failures and ends of ranks
            are events and need no interval.
        log_line_prefix_template: put in front of every line; ``"[rank ${rank}] "``, also ``${local_rank}``.
        kwargs: keyword arguments of the function.
        start_method: ``"auto"`` chooses and says why. ``"forkserver"``: ranks are forked from a warm process that has
            torch imported and nothing of this notebook in it. ``"fork"``: from this one, so data in memory is shared
            and nothing is pickled. ``"xla"``: the same on TPUs, in the place of ``xmp.spawn(start_method="fork")``.
            ``"spawn"``: fresh interpreters. ``"inline"``: one rank, in this process, for a debugger.
        devices: ``"cpu"`` or another type of device (``"cuda"``, ``"xla"``, ``"xpu"``, ``"mps"``), or numbers of the
            GPUs to use, one rank each. None is all that are visible, of the best type there is.
        timeout: seconds from this call after which the launch is stopped, all its attempts together. None is no limit.
        block: False returns a `Launch` at once, and the cell ends; several launches may run. A checkpoint of its
            training can be saved, and it can be stopped after its epoch.
        progress: ``"widget"`` shows a panel of the ranks, and ``"text"`` a line now and then. ``"auto"`` is
            the one that can be seen here. ``"off"`` shows nothing.
        env: environment variables of the ranks, on top of those of this process.
        by_value: modules of yours to send as they are in memory here, instead of importing them in the ranks.
        resume: have `Accelerator.resumable` go on from the newest whole checkpoint that there is. Ranks that are
            started again after a failure (``max_restarts``) do so anyway, but with checkpoints of this launch only.
        fold_output: show a line that all ranks print once, and put the rank in front of others, as ``%%distributed``
            cells do. False shows every line at once, as it was printed. None is True, unless
            `log_line_prefix_template` is given.
        engine: who starts a process on each of several machines, which this one notebook then has ranks on. ``"ssh"``:
            OpenSSH, with your keys and ``~/.ssh/config``. ``"command"``: a command of yours, `command_template`.
            ``"ray"``: a cluster of Ray. ``"auto"`` is this machine alone. None is what ``%distributed config``,
            ``NB_ACCELERATE_ENGINE`` or the configuration file says, and ``"auto"`` without. The same holds for the four
            options below.
        hosts: names of the machines, each with its number of ranks: ``["a:8", "me@b:4"]``, which makes 12; leave
            `num_processes` out then. Without numbers, `num_processes` is shared out evenly, or each machine has a rank
            for each of its GPUs, or one. The first machine has rank 0.
        address: with ``engine="ray"``, the head of the cluster: ``"HEAD:6379"``. Without it, and without
            ``RAY_ADDRESS``, a cluster of this machine alone is started.
        command_template: with ``engine="command"``, what runs a command on a machine, with that command's stdin and
            stdout: ``"kubectl exec -i {host} -- {command}"``.
        remote_python: with ``"ssh"`` and ``"command"``, what starts Python on those machines; by default ``python3``.
            Python and PyTorch have to have the minor versions of those here, and this package the same version.

    Returns:
        The return values of this machine's ranks, or with an `engine` of all, in rank order. A cell that ends in
        the call shows nothing if all of them are None. Tensors on a device come back on the CPU. With ``block=False`` a
        `Launch`.

    Raises:
        ConfigError: an argument cannot be; nothing was started.
        UnknownArgumentError: there is no argument of that name.
        ShippingError: the function, an argument or a result cannot be sent to another process. ``results`` on the
            exception has what other ranks returned, by rank.
        RankDiedError: a rank's process ended before the function returned: carries its signal or exit code.
        DeadlineError: `timeout` has passed.
        DeadlockError: ranks on CPUs have waited for 30 s for others that have returned.
        KeyboardInterrupt: the cell was interrupted. Every rank has ended.
        BaseException: what the function raised in a rank, with its own type. The first cause, if several ranks fail.

    Examples:
        >>> def train(lr):
        ...     accelerator = Accelerator()
        ...     return accelerator.process_index
        >>> notebook_launcher(train, args=(0.1,), num_processes=2)
        2 processes on CPU
        [0, 1]
    """
    if others:
        _refuse(function, others)
    engine_options = Environment().engine_options(
        engine=engine,
        hosts=hosts,
        address=address,
        command_template=command_template,
        remote_python=remote_python,
    )
    ranks_unspecified = num_processes is None and devices is None and num_nodes == 1
    defaults, source = _defaults(engine_options) if ranks_unspecified else ({}, "")
    notice = ", ".join(f"{name}={value!r}" for name, value in defaults.items())
    options = LaunchOptions(
        function=function,
        args=args,
        kwargs=kwargs or {},
        num_processes=defaults.get("num_processes", num_processes),
        mixed_precision=mixed_precision,
        use_port=use_port,
        master_addr=master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=rdzv_conf,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
        start_method=start_method,
        devices=defaults.get("devices", devices),
        timeout=timeout,
        progress=progress,
        env={RESUME: str(int(resume)), LAUNCH: secrets.token_hex(8), **(env or {})},
        by_value=tuple(by_value),
        fold_output=log_line_prefix_template is None if fold_output is None else fold_output,
        engine=engine_options,
    )
    with explain_resource_errors():
        cluster = None if options.engine.is_local else Cluster(options, reuse_hosts=True)
        plan = cluster.plan if cluster else make_plan(options, facts_here(options.env))
    if cluster is not None:
        options = replace(options, by_value=(*options.by_value, *cluster.by_value))
    try:
        return _start(options, plan, cluster, f"{notice}: from {source}" if notice else "", block=block)
    except BaseException as error:
        if cluster is not None:
            cluster.close()
        # IPython prints the cause and every frame of a SyntaxError: without ours the user's line is easily found.
        if wants_full() or not (isinstance(error, SyntaxError) and isinstance(error.__cause__, RankTraceback)):
            raise
        raise error.with_traceback(None) from None


def _start(
    options: LaunchOptions,
    plan: LaunchPlan,
    cluster: Cluster | None,
    notice: str,
    *,
    block: bool,
) -> Values | Launch:
    sink = sink_here()
    front_end = choose_front_end(options.progress)
    display_id = ""
    guard = OutputGuard(sink)
    if front_end != "off":
        with guard:
            if notice:
                sink.write("stdout", f"{notice}\n")
            display_id = announce(plan, sink, "text" if plan.method.is_inline else front_end)
        notes = cluster.notes if cluster else ()
        for warning in (*plan.warnings, *notes, *gpu_warnings(plan.kind, plan.device_names)):
            with guard:
                sink.write("stderr", warning + "\n")
    if plan.method.is_inline:
        return _run_inline(options, plan, sink)
    launch = Launch(options, plan, sink, front_end, display_id, placing=cluster)
    if block:
        return launch.run()
    launch.run_in_background()
    return launch


def _refuse(function: Callable[..., Any], others: Mapping[str, Any]) -> NoReturn:
    """Say what to write for an argument that is not the launcher's: often it is meant for the function."""
    name = next(iter(others))
    called = getattr(function, "__name__", "function")
    taken: Iterable[str] = ()
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        taken = inspect.signature(function).parameters
    *known, _others = inspect.signature(notebook_launcher).parameters
    instead = suggest(name, known)
    if name in taken:
        instead = (
            f" It is an argument of {called}: notebook_launcher({called}, kwargs=dict({name}={shown(others[name])}))"
        )
    raise UnknownArgumentError(f"notebook_launcher has no argument {name!r}.{instead}")


def _defaults(engine: EngineOptions) -> tuple[dict[str, Any], str]:
    """Return which ranks to start where the call does not say, and who says so: the notebook before the file."""
    # What the file says of ranks is about one machine.
    names = ("num_processes", "devices")
    of_notebook: dict[str, Any] = {name: SESSION_DEFAULTS[name] for name in names if name in SESSION_DEFAULTS}
    if of_notebook:
        return of_notebook, "%distributed config"
    file = read_config() if engine.is_local else None
    return (file.launcher_arguments(), str(default_path())) if file is not None else ({}, "")


def _run_inline(options: LaunchOptions, plan: LaunchPlan, sink: Sink) -> Values:
    """Call the function in this process, in the environment of a single rank, which is undone afterwards."""
    with OutputGuard(sink):
        sink.close()  # what was announced is shown before what the function prints
    before = dict(os.environ)
    with open_rendezvous(options, plan) as rendezvous:
        os.environ.update(rank_environ(plan, rendezvous, 0, base=before, extra=options.env))
        # The one rank makes its own store at MASTER_PORT. So the port is freed, and no store of an agent is announced.
        if rendezvous.listener is not None:
            rendezvous.listener.close()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        had_group = has_group()
        try:
            return Values([options.function(*options.args, **options.kwargs)])
        finally:
            if has_group() and not had_group:
                training_half().close_groups()
            os.environ.clear()
            os.environ.update(before)
