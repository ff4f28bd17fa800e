"""Make the message that sets up a new rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.notebook.display.frontend import is_in_kernel
from nb_accelerate.notebook.launch.environ import rank_environ, working_directory
from nb_accelerate.notebook.launch.settings import pack_settings, set_here
from nb_accelerate.notebook.protocol.messages import Setup
from nb_accelerate.notebook.protocol.random_states import RandomStates
from nb_accelerate.notebook.protocol.shipping import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.base.seam import StoreSpec
    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous
    from nb_accelerate.notebook.protocol.messages import Parcel
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.ranks.handle import RankHandle


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
    sent = {name: (str(file), file.read_text()) for name, file in files.items() if file.is_file()}
    return pack((None if is_script else RandomStates.here(), settings, sent))


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
