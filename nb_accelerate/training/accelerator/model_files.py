"""Save the weights of a model, or any object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.checkpoint.files import clean_state_dict_for_safetensors, write
from nb_accelerate.training.checkpoint.model import write_model
from nb_accelerate.training.process import context
from nb_accelerate.training.process.notes import note
from nb_accelerate.training.pytree import send_to_device
from nb_accelerate.training.state.choices import current_process

if TYPE_CHECKING:
    import os

    from torch import Tensor, nn


class ModelFilesMixin(CoreMixin):
    """Files with the weights of models, as Hugging Face accelerate and transformers write them."""

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes weights: the main process, or the main process of each machine."""
        topology = self.core.process.topology
        return topology.is_local_main if self.core.recording.project.save_on_each_node else topology.is_main

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the weights of a model by name.

        All processes call it together where models are sharded. There, only processes that write weights (see
        `should_save_model`) get them, in host memory; others get an empty dict.

        Examples:
            ```python
            model = accelerator.prepare(model)
            weights = accelerator.get_state_dict(model)  # on all processes
            if accelerator.is_main_process:
                torch.save(weights, "weights.pt")
            ```

        Args:
            model: prepared or not.
            unwrap: by the names of the user's model; else by the names of the prepared one.
        """
        strategy = self.core.strategy
        if unwrap:
            model = strategy.unwrap(model, keep_torch_compile=False)
        return strategy.model_state(model, keep=self.should_save_model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model, for `load_checkpoint_in_model` or the model's own ``load_state_dict``.

        The main process writes; others return at once. Weights that are there already are replaced when all new ones
        are on the disk.

        Examples:
            ```python
            model = accelerator.prepare(model)
            accelerator.save_model(model, "weights")  # weights/model.safetensors
            ```

        Args:
            model: prepared or not.
            save_directory: made if it is not there; what else is in it stays.
            max_shard_size: bytes of a file, or text such as ``"5GB"``; a larger model is split, and an index written.
            safe_serialization: safetensors; else what `torch.save` writes.

        Raises:
            CheckpointError: a weight is on the device ``meta``, or is nothing that safetensors can hold.
            ConfigError: there is a file of that name, or ``max_shard_size`` is not a size.
        """
        lacking = [name for name, value in model.state_dict().items() if getattr(value, "is_meta", False)]
        if lacking:
            raise CheckpointError(f"{lacking[0]} is on the device meta: it has no numbers that could be saved.")
        weights = self.get_state_dict(model)
        if self.should_save_model:
            rehearsal = context.rehearsal()
            with self.core.shown_as_saving():
                write_model(
                    weights,
                    save_directory if rehearsal is None else rehearsal.files.written(save_directory),
                    max_shard_size=max_shard_size,
                    safe_serialization=safe_serialization,
                )


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
        given, rehearsal = obj, context.rehearsal()
        if safe_serialization:
            obj = clean_state_dict_for_safetensors(given)
            tied = [name for name in given if name not in obj]
            if tied:
                note(f"{f} has no {', '.join(tied)}: other names of tensors that are in it.")
        write(obj, f if rehearsal is None else rehearsal.files.written(f), safe_serialization=safe_serialization)
