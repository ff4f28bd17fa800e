"""Call a function once for each configuration: launches of one rank each, some at a time."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.base.records.naming import labels
from nb_accelerate.base.words import duration
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.launcher import notebook_launcher
from nb_accelerate.notebook.launch.machine import facts_here
from nb_accelerate.notebook.launch.plan import make_plan
from nb_accelerate.notebook.ranks.failing.errors import summary
from nb_accelerate.notebook.ranks.output.sinks import sink_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nb_accelerate.notebook.launch.launch import Launch

_INTERVAL = 0.02  # seconds that each launch that is on is waited for, in turns


def sweep(
    function: Callable[..., Any], configurations: Iterable[Mapping[str, Any]], num_processes: int | None = None
) -> list[Any]:
    """Call a function once for each configuration, some at a time, and return its values in their order.

    Each call has a process alone, and one device: a GPU, or a share of the cores.

    Examples:
        ```python
        results = sweep(train, [dict(lr=lr) for lr in (0.3, 0.1, 0.03)], num_processes=2)
        ```

    Args:
        function: trains as a function of one rank.
        configurations: its keyword arguments, for each call.
        num_processes: calls at a time. None is one for each GPU; without GPUs, one.

    Raises:
        ConfigError: a configuration does not fit the function; or the chips of a machine (TPU) belong to one launch.
        BaseException: what the first configuration that failed has raised, when all others have ended. Its ``results``
            have the value, or the exception, of each configuration.
    """
    runs = _checked(function, configurations)
    plan = make_plan(LaunchOptions(function=function, num_processes=num_processes), facts_here({}), may_copy=False)
    if plan.kind.start_runtime is not None:
        raise ConfigError(
            f"The {plan.kind.label}s of a machine belong to one launch. Write [notebook_launcher(train, kwargs=run) "
            "for run in runs], which uses all of them for each run."
        )
    sink = sink_here()
    names = labels([f"#{index}" for index in range(len(runs))], runs)
    places = [[number] if plan.device_names else plan.device for number in range(plan.num_processes)]
    # Launches know nothing of each other: each would take all cores.
    env = {"OMP_NUM_THREADS": str(plan.num_threads)}
    waiting = list(range(len(runs)))
    running: dict[int, tuple[int, Launch, float]] = {}
    results: list[Any] = [None] * len(runs)
    errors: dict[int, BaseException] = {}
    try:
        while waiting or running:
            for place in [place for place in range(len(places)) if place not in running and waiting]:
                if not waiting:
                    break
                index = waiting.pop(0)
                launch = notebook_launcher(
                    function,
                    kwargs=runs[index],
                    num_processes=1,
                    devices=places[place],
                    block=False,
                    progress="off",
                    engine="auto",  # on this machine, though other launches of the notebook may use an engine
                    env=env,
                    log_line_prefix_template=f"[{names[index]}] ".replace("$", "$$"),
                )
                running[place] = index, launch, time.monotonic()
            for place, (index, launch, began) in tuple(running.items()):
                if not launch.wait(_INTERVAL):
                    continue
                del running[place]
                try:
                    results[index] = launch.result()[0]
                    ended = "done"
                except BaseException as error:  # costs only itself
                    results[index] = errors[index] = error
                    ended = summary(error)
                sink.write(sink.own_stream, f"[{names[index]}] {ended} · {duration(time.monotonic() - began)}\n")
    finally:
        for _, launch, _ in running.values():  # an interrupt ends what is on
            launch.stop()
        sink.close()
    if errors:
        first = errors[min(errors)]
        with contextlib.suppress(AttributeError):  # a type with slots
            first.results = results  # type: ignore[attr-defined]
        raise first
    return results


def _checked(function: Callable[..., Any], configurations: Iterable[Mapping[str, Any]]) -> Sequence[dict[str, Any]]:
    example = "Write sweep(train, [dict(lr=0.1), dict(lr=0.01)])."
    if isinstance(configurations, Mapping):
        raise ConfigError(f"The configurations are a list of dicts, and a dict was given. {example}")
    runs = list(configurations)
    if not runs:
        raise ConfigError(f"There is no configuration. (A generator can be read only once.) {example}")
    for index, run in enumerate(runs):
        try:
            signature = inspect.signature(function)
        except ValueError:  # a function of C code has none
            break
        try:
            signature.bind(**run)
        except TypeError as error:
            name = getattr(function, "__name__", "the function")
            raise ConfigError(f"Configuration {index}, {run!r}, does not fit {name}{signature}: {error}.") from None
    return [dict(run) for run in runs]
