"""A Llama of 1.8 GB in float32 whose weights stay in their files, beside accelerate and beside weights in memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn

from nb_accelerate import init_empty_weights, load_checkpoint_and_dispatch, notebook_launcher
from nb_accelerate.big_modeling import dispatch_model

Way = Literal["resident", "ours", "theirs"]
Times = list[tuple[float, float]]

LAYERS, WIDTH = 24, 1024
ROUNDS = 3
TIMEOUT = 600


def _config(layers: int = LAYERS, width: int = WIDTH) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32_000,
        attn_implementation="eager",
    )


def _write_model(folder: str) -> int:
    """Write the weights in shards of 500 MB, and return their bytes."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(_config())
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(parameter.nbytes for parameter in model.parameters())


def _make(way: Way, folder: str) -> Any:
    """Load the model: into memory, mapped, or with accelerate's hooks that read its files, as transformers does."""
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(_config())
    model.eval()
    if way == "resident":
        model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # out of the files, into memory
        return model
    if way == "ours":
        return load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
    import accelerate

    files = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    index = {
        name: {"safetensors_file": str(Path(folder) / file), "weight_name": name, "dtype": "float32"}
        for name, file in files.items()
    }
    return accelerate.dispatch_model(
        model, {"": "disk"}, main_device="cpu", offload_dir=f"{folder}/theirs", offload_index=index, force_hooks=True
    )


def _time(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds, and the seconds of the processors, that an action takes."""
    began, used = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - used


def _warm_tokens(folder: str, rounds: int) -> dict[Way, Times]:
    """Time a forward of one token, files in the page cache, by each way in turns whose order is drawn each time."""
    ways: tuple[Way, ...] = ("resident", "ours", "theirs")
    models = {way: _make(way, folder) for way in ways}
    token = torch.ones(1, 1, dtype=torch.long)
    taken: dict[Way, Times] = {way: [] for way in ways}
    with torch.inference_mode():
        expected = models["resident"](token).logits
        for model in models.values():
            torch.testing.assert_close(model(token).logits, expected)
        chance = random.Random(0)
        for _ in range(rounds):
            for way in chance.sample(ways, k=len(ways)):
                taken[way].append(_time(lambda model=models[way]: model(token)))
    return taken


def _first_forward(way: Way, folder: str, tokens: int, cold: bool) -> tuple[tuple[float, float], tuple[float, float]]:
    """Time loading, then a first forward, in this new process, with files in the page cache or not."""
    (_drop if cold else _read)(folder)
    model: list[Any] = []
    load = _time(lambda: model.append(_make(way, folder)))
    if cold:
        # A virtual machine gives memory back that is free for seconds. To touch such a page again costs microseconds,
        # which look like the program's own. `_read` measures the disk in memory that was just in use, so this is too.
        _read(folder)
        _drop(folder)
    ids = torch.ones(1, tokens, dtype=torch.long)
    with torch.inference_mode():
        return load, _time(lambda: model[0](ids))


def _load(folder: str) -> tuple[float, int]:
    """Return the seconds that a load on "disk" takes, without making the model, and the bytes written meanwhile."""
    from transformers import LlamaForCausalLM

    with init_empty_weights():
        model = LlamaForCausalLM(_config())
    before = psutil.Process().io_counters().write_bytes
    seconds, _ = _time(lambda: load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"}))
    return seconds, psutil.Process().io_counters().write_bytes - before


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.safetensors"))


def _drop(folder: str) -> None:
    """Drop the files from the page cache. Pages that a process has mapped stay."""
    for file in _files(folder):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(folder: str) -> float:
    """Read the files into the page cache, and return the bytes a second."""
    piece = bytearray(1 << 23)
    began = time.perf_counter()
    for file in _files(folder):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(piece):
                pass
    return sum(file.stat().st_size for file in _files(folder)) / (time.perf_counter() - began)


def _shared_memory(folder: str | None) -> int:
    """Return the bytes of memory that this rank answers for, when all have computed; those it shares by their share."""
    from nb_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    ids = torch.ones(1, 1, dtype=torch.long)
    tiny: Any = nn.Linear(8, 8)
    model = _make("ours", folder) if folder else tiny
    with torch.inference_mode():
        model(ids) if folder else tiny(torch.ones(1, 8))
    accelerator.wait_for_everyone()
    used = int(psutil.Process().memory_full_info().pss)
    accelerator.wait_for_everyone()
    return used


def _hooks(rounds: int) -> dict[str, float]:
    """Return the median seconds of a forward of 24 tiny layers: plain, and with maps by which nothing moves."""
    import accelerate
    from transformers import LlamaForCausalLM
    from turns import medians

    def make() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(_config(width=64)).eval()

    plain, mapped = make(), {"": "cpu"}
    models = {
        "plain": plain,
        "ours": dispatch_model(make(), mapped, force_hooks=True),
        "accelerate": accelerate.dispatch_model(make(), mapped, force_hooks=True),
    }
    ids = torch.ones(1, 1, dtype=torch.long)
    with torch.inference_mode():
        return medians({name: lambda model=model: model(ids) for name, model in models.items()}, rounds=rounds)


def _alone(function: Callable[..., Any], *args: Any, ranks: int = 1) -> list[Any]:
    """Run a function in new processes."""
    return notebook_launcher(  # type: ignore[no-any-return]
        function, args, ranks, progress="off", start_method="forkserver", timeout=TIMEOUT
    )


def _median(times: Sequence[tuple[float, float]], which: int) -> float:
    return statistics.median(time[which] for time in times)


def measure() -> Iterator[str]:
    parent = Path("build").resolve()
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield from _measure(folder)


def _measure(folder: str) -> Iterator[str]:
    size = _alone(_write_model, folder)[0]
    os.sync()

    hooks = _alone(_hooks, 100)[0]
    yield (
        f"24 tiny layers, nothing moves  {hooks['ours'] / hooks['plain']:5.2f} of plain  ({1e3 * hooks['plain']:.1f} "
        f"ms); accelerate {hooks['accelerate'] / hooks['plain']:.2f}"
    )

    warm = _alone(_warm_tokens, folder, 40)[0]
    mine, plain, theirs = (warm[way] for way in ("ours", "resident", "theirs"))
    yield (
        f"a token, files cached          {_median(mine, 0) / _median(plain, 0):5.2f} of resident (processors "
        f"{_median(mine, 1) / _median(plain, 1):.2f}; {_median(mine, 0):.3f} s), "
        f"{_median(mine, 0) / _median(theirs, 0):.2f} of accelerate (processors "
        f"{_median(mine, 1) / _median(theirs, 1):.2f})"
    )

    for tokens in (1, 96):
        cold: dict[Way, Times] = {"ours": [], "theirs": [], "resident": []}
        rates = []
        for _ in range(ROUNDS):
            _drop(folder)
            rates.append(_read(folder))
            for way, times in cold.items():
                if way != "theirs" or not times:  # theirs takes long, and is not the question
                    times.append(_alone(_first_forward, way, folder, tokens, way != "resident")[0][1])
        computing, disk = _median(cold["resident"], 0), size / statistics.median(rates)
        yield (
            f"{tokens:2d} token{'s' if tokens > 1 else ' '}, files not cached     "
            f"{_median(cold['ours'], 0) / max(computing, disk):5.2f} of the larger of disk ({disk:.2f} s, "
            f"{statistics.median(rates) / 1e9:.2f} GB/s) and resident ({computing:.2f} s); accelerate "
            f"{_median(cold['theirs'], 0) / max(computing, disk):.2f}"
        )

    loads = [_alone(_load, folder)[0] for _ in range(ROUNDS)]
    written = max(num_bytes for _, num_bytes in loads)
    yield (
        f'load on "disk"                 {statistics.median(seconds for seconds, _ in loads):5.3f} s for '
        f"{size / 1e9:.1f} GB, {written} bytes written"
    )

    empty, full = (sum(_alone(_shared_memory, where, ranks=4)) for where in (None, folder))
    share = (full - empty) / size
    yield f"memory of 4 ranks              {share:5.2f} of the weights, beyond that of 4 empty ranks"
    shutil.rmtree(f"{folder}/theirs", ignore_errors=True)
