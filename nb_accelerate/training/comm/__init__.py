"""Exchange tensors and objects between ranks."""

from nb_accelerate.training.comm.collectives import Collectives, SingleCollectives
from nb_accelerate.training.comm.torch_distributed import CheckedCollectives, TorchCollectives

__all__ = ["CheckedCollectives", "Collectives", "SingleCollectives", "TorchCollectives"]
