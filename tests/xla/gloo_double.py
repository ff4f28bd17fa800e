"""A machine with several TPU chips, played by processes with one XLA device on the CPU each.

Tensors, programs and files are XLA's own. What is played is the number of chips, and collectives, which gloo carries as
soon as they are recorded. So this shows how ranks start, meet, fail and end, and not whether their programs are alike.
"""

import os
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = str(Path(tempfile.gettempdir()) / f"gloo-double-{os.getpid()}")


def remove() -> None:
    """Remove what ranks have met through."""
    shutil.rmtree(FOLDER)


def install(chips: int) -> None:
    """Let this process, a notebook's kernel, find chips. Its forks, and those of its servers, play one each."""
    os.environ["PJRT_DEVICE"] = "TPU"
    here, others = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    os.environ |= {"GLOO_DOUBLE": FOLDER, "PYTHONPATH": f"{here}{os.pathsep}{others}"}  # see sitecustomize.py
    from torch_xla._internal import pjrt

    from nb_accelerate.base.devices import xla

    Path(FOLDER).mkdir()
    xla.num_chips = lambda: chips
    play(FOLDER, pjrt)


def play(folder: str, pjrt: ModuleType) -> None:
    """Let this process and its forks play one of the chips each, when their runtime starts."""
    pjrt.initialize_multiprocess = lambda rank, world_size: join(rank, world_size, folder)
    pjrt.initialize_singleprocess = lambda: join(0, 1, folder)


def join(rank: int, world_size: int, folder: str) -> None:
    """Be one of the chips. Called in each rank, before the runtime starts."""
    os.environ |= {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "1",
        "PJRT_LOCAL_PROCESS_RANK": str(rank),
        "PJRT_LOCAL_PROCESS_COUNT": str(world_size),
    }
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla import runtime

    runtime._WORLD_SIZE, runtime._ORDINAL = world_size, rank
    if world_size == 1:
        return
    file = Path(folder) / str(os.getppid())  # ranks of one launch are forks of one process
    group = dist.ProcessGroupGloo(dist.FileStore(str(file), world_size), rank, world_size)
    operations = {xm.REDUCE_SUM: dist.ReduceOp.SUM, xm.REDUCE_MAX: dist.ReduceOp.MAX}

    def reduced(kind: str, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        mine = tensor.detach().cpu().clone()
        wide = mine.float() if mine.dtype in (torch.bfloat16, torch.float16) else mine
        options = dist.AllreduceOptions()
        options.reduceOp = operations[kind]
        group.allreduce([wide], options).wait()
        return (wide if scale == 1.0 else wide * scale).to(mine.dtype).to(tensor.device)

    def all_reduce(kind: str, inputs: Any, scale: float = 1.0, **_: Any) -> Any:
        if isinstance(inputs, torch.Tensor):
            return reduced(kind, inputs, scale)
        torch_xla.sync()  # or the whole step would be computed again for each of its gradients
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(reduced(kind, tensor, scale))
        return inputs

    def all_gather(tensor: torch.Tensor, dim: int = 0, **_: Any) -> torch.Tensor:
        mine = tensor.detach().cpu().contiguous()
        every = [torch.empty_like(mine) for _ in range(world_size)]
        group.allgather([every], [mine]).wait()
        return torch.cat(every, dim).to(tensor.device)

    xm.all_reduce, xm.all_gather = all_reduce, all_gather
