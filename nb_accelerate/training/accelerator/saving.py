"""Save an object on the main process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nb_accelerate.training.checkpoint.files import clean_state_dict_for_safetensors, write
from nb_accelerate.training.pytree import send_to_device
from nb_accelerate.training.state.choices import current_process

if TYPE_CHECKING:
    import os

logger = logging.getLogger(__name__)


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save an object on the main process; on others, do nothing.

    Args:
        obj: what to save; with ``safe_serialization`` a dict of tensors.
        f: the file.
        save_on_each_node: on the first process of each machine instead, for disks that machines do not share.
        safe_serialization: write safetensors, with tensors that share memory written once.
    """
    process = current_process()
    topology = process.topology
    if process.kind.reads_later:
        obj = send_to_device(obj, "cpu")  # tensors of this device have no memory that can be read
    if topology.is_local_main if save_on_each_node else topology.is_main:
        given = obj
        if safe_serialization:
            obj = clean_state_dict_for_safetensors(given)
            tied = [name for name in given if name not in obj]
            if tied:
                logger.warning("%s has no %s: other names of tensors that are in it.", f, ", ".join(tied))
        write(obj, f, safe_serialization=safe_serialization)
