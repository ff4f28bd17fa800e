"""Python runs this when it starts: notebooks and commands plan launches on simgpu before they import torch."""

import os

if os.environ.get("SIMGPU_DEVICES"):
    from simgpu import row

    row.add()
