"""Checkpoints: what is in one, how it gets onto the disk in one piece, and how it is found again.

Files have the names and formats of Hugging Face accelerate, so that either package loads what the other saved::

    model.safetensors          optimizer.bin     random_states_<rank>.pkl
    (or pytorch_model.bin)     scheduler.bin     custom_checkpoint_<n>.pkl
    checkpoint.json, ours      scaler.pt         dl_state_dict.bin

``checkpoint.json`` is the manifest: all files with their sizes and checksums, and what is known about the run. The
second of a kind is ``optimizer_1.bin``. Where each rank holds a part of a model, there are folders instead of files,
``pytorch_model_fsdp_0/`` and ``optimizer_0/``: see `training.checkpoint.sharded`. A model that `save_model` splits
has an index beside its parts.
"""
