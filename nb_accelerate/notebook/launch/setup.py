"""What a new rank is set up with: the message `Setup`, its environment, and the settings of this process.

The environment has torchrun's variables, for code that was written for torchrun. Ranks are sent all settings when they
start, and later the changed ones.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.env import DEVICE
from nb_accelerate.base.config.file import CONFIG_FILE, read_config
from nb_accelerate.notebook.display.frontend import is_in_kernel
from nb_accelerate.notebook.protocol.changed_modules import changed_here
from nb_accelerate.notebook.protocol.messages import Setup
from nb_accelerate.notebook.protocol.random_states import RandomStates
from nb_accelerate.notebook.protocol.settings import is_same, pack as pack_by_module, settings_here
from nb_accelerate.notebook.protocol.shipping import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.protocol.messages import Parcel
    from nb_accelerate.notebook.protocol.settings import Key
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.handle import RankHandle


logger = logging.getLogger("nb_accelerate")

_ENVIRON = ("sys", "environ")
# Settings that have fields of their own in `Setup`.
_OF_SETUP = {_ENVIRON, ("sys", "path"), ("sys", "argv"), ("sys", "folder")}

# What ranks on another machine do not follow.
_OF_MACHINE = {_ENVIRON, ("sys", "folder"), ("sys", "limits"), ("sys", "cores"), ("sys", "umask")}

_reported_settings: set[Key] = set()  # settings that could not be sent, which the user knows


def set_here(*, at_start: bool = True, is_elsewhere: bool = False) -> dict[Key, Any]:
    """Return what this process is set to, and what it has changed in modules."""
    left_out = (_OF_SETUP if at_start else set()) | (_OF_MACHINE if is_elsewhere else set())
    return {key: value for key, value in (settings_here() | changed_here()).items() if key not in left_out}


def differences(before: Mapping[Key, Any], now: Mapping[Key, Any], *, is_elsewhere: bool) -> dict[Key, Any]:
    """Return the settings that are others now: each with its value, the environment with both values of variables."""
    changed = {key: value for key, value in now.items() if not (key in before and is_same(before[key], value))}
    if is_elsewhere:
        changed = {key: value for key, value in changed.items() if key not in _OF_MACHINE}
    if _ENVIRON in changed:
        old = {os.fsdecode(name): os.fsdecode(value) for name, value in before[_ENVIRON].items()}
        new = {os.fsdecode(name): os.fsdecode(value) for name, value in now[_ENVIRON].items()}
        names = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        changed[_ENVIRON] = {name: (old.get(name), new.get(name)) for name in names}
    return changed


def pack_settings(values: Mapping[Key, Any]) -> dict[str, bytes]:
    """Return settings for ranks. Settings that cannot be pickled are left out, and named once."""
    try:
        return pack_by_module(values)
    except (
        Exception
    ):  # pickling runs code of users; which setting fails is looked for only now, because that takes long
        sendable = dict(values)
        for key, value in values.items():
            try:
                pack_by_module({key: value})
            except Exception as error:
                del sendable[key]
                if key not in _reported_settings:
                    _reported_settings.add(key)
                    logger.warning(
                        "%s as this notebook has it does not travel to ranks (%s). Set it in the function or cell that "
                        "they run, or start them with start_method='fork'",
                        ".".join(key),
                        error,
                    )
        return pack_by_module(sendable)


# Variables that describe the kernel's process, and are not true of a rank.
_KERNELS_OWN = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT", "PYTEST_CURRENT_TEST")


def rank_environ(
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    local_rank: int,
    *,
    base: Mapping[str, str],
    extra: Mapping[str, str],
    attempt: int = 0,
    max_restarts: int = 0,
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Args:
        extra: the user's variables; they override all others except variables that select devices.
    """
    environ = {key: value for key, value in base.items() if key not in _KERNELS_OWN}
    environ.setdefault("OMP_NUM_THREADS", str(plan.num_threads))
    environ |= {
        **plan.topology_of(local_rank, node_rank=rendezvous.node_rank).as_variables(),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
    }
    # For programs that ranks start: they find the store at the master's address, where a rank of ours serves it. On one
    # machine nothing listens there, and they serve one by themselves.
    if rendezvous.num_nodes > 1:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    else:
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not (rendezvous.keeps_interface and variable in environ):
            environ[variable] = rendezvous.interface
    if plan.kind.is_host:
        environ["ACCELERATE_USE_CPU"] = "true"
    elif "ACCELERATE_USE_CPU" in environ:  # and devices were asked for, by number or by name
        environ["ACCELERATE_USE_CPU"] = "false"
    environ.pop(DEVICE, None)  # it is of this process, if that is a rank itself
    if plan.is_kind_asked_for and not plan.kind.is_host:
        environ[DEVICE] = plan.device
    if plan.mixed_precision != "no":
        environ["ACCELERATE_MIXED_PRECISION"] = plan.mixed_precision
    environ |= {key: os.fspath(value) for key, value in extra.items()}
    return environ | plan.device_variables(local_rank)  # chosen among the devices that were asked for


def variables_of_file(env: Mapping[str, str]) -> dict[str, str]:
    """Return what the configuration file of this process says to an `Accelerator`, for ranks that do not read it.

    Where the environment of this process says otherwise, that counts, as for ranks here.

    Args:
        given: the user's variables. They may name another file, which ranks read.
    """
    file = None if CONFIG_FILE in env else read_config()
    from_file = {} if file is None else file.as_variables({**os.environ, **env})
    return {name: os.environ.get(name) or value for name, value in from_file.items()}


def working_directory() -> str:
    """Return the working directory of this process; "" if it was deleted, which ranks then report."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


def pack_notebook(
    *,
    is_script: bool = False,
    inherits: bool = False,
    is_elsewhere: bool = False,
    modules: Sequence[ModuleType] = (),
) -> Packed:
    """Pack what all ranks get of this process as of now: states of random numbers, settings.

    Args:
        is_script: ranks run a script, which seeds and sets all by itself, as with torchrun.
        inherits: they are forks of this process, which are set to what it is.
        is_elsewhere: they are on other machines.
        modules: that these import which do not have them.
    """
    settings = {} if is_script or inherits else pack_settings(set_here(is_elsewhere=is_elsewhere))
    files = {module.__name__: Path(str(module.__file__)) for module in modules}
    sources = {name: (str(file), file.read_text()) for name, file in files.items() if file.is_file()}
    return pack((None if is_script else RandomStates.here(), settings, sources))


def make_setup(
    handle: RankHandle,
    options: LaunchOptions,
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    notebook: Parcel,
    *,
    store: StoreSpec | None = None,
    attempt: int = 0,
    base: Mapping[str, str] | None = None,
) -> Setup:
    """Return the `Setup` of a rank: with environment, working directory and search path of this process as of now.

    Args:
        base: variables that a rank's own are added to; None for the variables of this process.
    """
    environ = rank_environ(
        plan,
        rendezvous,
        handle.local_rank,
        base=os.environ if base is None else base,
        extra=options.env,
        attempt=attempt,
        max_restarts=options.max_restarts,
    )
    return Setup(
        rank=handle.rank,
        environ=environ,
        cwd=working_directory(),
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        num_threads=plan.num_threads,
        notebook=notebook,
        store=store,
        shows_displays=is_in_kernel(),
    )
