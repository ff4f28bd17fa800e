"""What this process is and what its newest `Accelerator` chose, under the names of ``accelerate.state``.

::

    PartialState -----> ProcessContext <----- AcceleratorState ----> Choices <---- GradientState
                        (what this process is)            (of one Accelerator, or of the newest)

The states are views: they hold nothing, so two of them never disagree, and neither disagrees with the `Accelerator`.
Their attributes cannot be set, and a state that is unpickled shows the process in which it is loaded.
"""

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.training.state.accelerator import AcceleratorState, GradientState, is_initialized
from nb_accelerate.training.state.partial import PartialState, ThreadLocalSharedDict, do_nothing

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]
