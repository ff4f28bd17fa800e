"""simgpu: a device in the memory of the host, which behaves like a GPU. Tests train on it where there is no GPU.

`load` is an entry point of the group ``torch.backends``: ``import torch`` calls it in every process that has the folder
above on its path. ``SIMGPU_DEVICES`` says how many devices there are; without it there are none.
"""

from __future__ import annotations


def load() -> None:
    """Give torch the device, its module `torch.simgpu` and the backend `simccl`."""
    from simgpu import backend, module, row

    module.register()
    backend.register()
    row.add()
