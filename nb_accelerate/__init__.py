"""Distributed PyTorch that is at home in a Jupyter notebook.

There are four ways in.

A few lines make a training loop run on one device or on many, with the names of Hugging Face accelerate. In a
notebook, ``%%distributed --convert`` above a plain loop needs none of them::

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = loss_function(model(inputs), targets)
        accelerator.backward(loss)

A function with such a loop runs on all devices, and its values come back as a list, by rank::

    notebook_launcher(train, args=(10,), num_processes=2)

A cell runs on processes (*ranks*) that keep their variables, after ``%load_ext nb_accelerate``::

    %%distributed -n 2
    print(rank, world_size, device)

A script runs with the flags of ``accelerate launch``::

    $ nb-accelerate launch --num_processes 2 train.py

Documentation: ``%distributed help``, ``%%distributed --help`` and ``nb-accelerate --help`` say what there is to write;
``help(nb_accelerate.Accelerator)`` and ``help(nb_accelerate.notebook_launcher)`` explain their arguments. Tutorial,
guides and reference are in ``README.md`` and ``notebooks/`` of the repository; ``make docs`` builds a site of them.
``nb-accelerate env`` describes this machine, and ``nb-accelerate test`` trains on it.
"""

# Importing the package and `%load_ext` take milliseconds and leave a kernel as it was: each public name is imported
# when it is first used, by the table in `__init__.pyi`. No other names are public.
from nb_accelerate.base.lazy import attach
from nb_accelerate.base.version import __version__ as __version__
from nb_accelerate.errors import NbAccelerateError
from nb_accelerate.errors.traceback_lines import shorten_tracebacks

__getattr__, __dir__ = attach(__name__)
shorten_tracebacks(NbAccelerateError)
del NbAccelerateError, attach, shorten_tracebacks  # the public names are those of __init__.pyi
