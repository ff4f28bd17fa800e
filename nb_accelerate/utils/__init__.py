"""The names of ``accelerate.utils``. The modules of this folder list them, each under the module that accelerate has.

A name is imported from where it is defined when it is first used, without the other names of its module.
"""

from nb_accelerate.base.lazy import attach

__getattr__, __dir__ = attach(__name__, advice="; nb_accelerate/compat/parity.md lists what is left out")
