"""Say why sharded models cannot go on when the process group of their ranks was replaced by a new one.

Shards of a rank that was replaced are lost, and the others may have been stopped with a block half gathered. Without
this, the next forward would fail in words that say nothing of that.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

from nb_accelerate.errors import ConfigError


def refuse_sharded_models() -> None:
    """Make the next forward of each model of this process that is sharded (FSDP2) raise an error.

    Call it when the process group is about to be replaced.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for one in gc.get_objects():
        if issubclass(type(one), fsdp.FSDPModule):
            one.register_forward_pre_hook(_refuse, prepend=True)


def _refuse(model: Any, _: object) -> NoReturn:
    raise ConfigError(
        f"This {type(model).__name__} was sharded before a rank failed. The ranks have met anew since, and its shards "
        "may not fit each other. Make it anew and load a checkpoint: model = accelerator.prepare(Model()), "
        "accelerator.load_state(...)."
    )
