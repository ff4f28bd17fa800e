"""Functions that scripts written for Hugging Face accelerate import from it, beside `Accelerator`.

They stand here by subject. The modules of accelerate's names (``nb_accelerate.utils.operations``,
``nb_accelerate.data_loader`` and so on) pass them on. Nothing that an `Accelerator` itself needs is here.
``parity.md`` lists what accelerate has and this package has not, and why.
"""
