"""Distributed PyTorch that is at home in a Jupyter notebook.

The public names are those of ``__init__.pyi``, beside this file, and no others. Each is imported when it is first used,
so that ``import nb_accelerate`` and ``%load_ext nb_accelerate`` take milliseconds and leave a kernel as it was.

The package has two halves over one base. The training half needs torch and runs in the ranks, and in plain
scripts. The notebook half runs in the kernel and does not import torch. They meet when a program runs, never
by an import::

    level  training half                                                        base                  notebook half
    12                                                                          __main__
    11                                                                          __init__  cli
    10     utils  data_loader  logging                                                                magics
     9     compat  optimizer  scheduler  local_sgd                                                    pool  launchers
     8     accelerator                                                                                launch
     7     state                                                                                      ranks
     6     strategies  checkpoint                                                                     worker  display
     5     optim  data  tracking  bigmodel                                                            diagnostics
     4     precision  comm                                                                            protocol
     3     process  pytree
     2                                                                          topology  lazy
     1                                                                          config  records  progress_page
     0                                                                          errors  version  devices  start_methods

A module imports from lower levels or from its own package, nothing from the other half, and torch at import in
the training half only. ``tests/structure/test_layers.py`` reads this picture and holds the sources to it.
"""

from nb_accelerate.errors import NbAccelerateError
from nb_accelerate.errors.traceback_lines import shorten_tracebacks
from nb_accelerate.lazy import attach
from nb_accelerate.version import __version__ as __version__

__getattr__, __dir__ = attach(__name__)
shorten_tracebacks(NbAccelerateError)
del NbAccelerateError, attach, shorten_tracebacks  # the public names are those of __init__.pyi
