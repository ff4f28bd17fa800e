"""What scripts written for Hugging Face accelerate expect around an `Accelerator`: states, free functions, checks.

States are views: they hold nothing, and show what the process is and what its newest `Accelerator` chose. The
modules of accelerate's names (``nb_accelerate.state``, ``nb_accelerate.utils.operations`` and so on) only pass on
what is here and below. ``parity.md`` lists what is not there, and why.
"""
