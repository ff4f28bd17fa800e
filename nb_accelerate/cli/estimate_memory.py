"""`nb-accelerate estimate-memory`: how much memory training a model will take, or where it fits to compute only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_PRECISIONS = ("no", "fp16", "bf16", "bf16 weights")
_COLUMNS = ("precision", "weights", "gradients", "Adam", "activations", "one process", "each of several")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `estimate-memory` to the command line."""
    parser = subparsers.add_parser(
        "estimate-memory",
        help="how much memory a model will take: for training, or where it fits for inference",
        description="Count what training with Adam takes: weights, gradients, the optimizer's state and, for a batch "
        "that you describe, activations. No weights are loaded. The columns are what `Accelerator` needs with each "
        "mixed precision; 'bf16 weights' is a model that was turned into bf16 as a whole. Each of several processes "
        "has the whole model, and a copy of the gradients to communicate.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with a config.json, a name on the Hub, or module:Class"
    )
    for name, what in (("batch_size", "sequences in a batch"), ("sequence_length", "tokens of a sequence")):
        action = parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=_count, metavar="N", help=what)
        action.option_strings = [f"--{name}"]
    parser.add_argument(
        "--precisions", nargs="+", choices=_PRECISIONS, default=_PRECISIONS, metavar="PRECISION", help="rows to show"
    )
    inference = parser.add_argument_group(
        "inference",
        "Where device_map='auto' puts the weights in float16, 8 bits and 4 bits (bitsandbytes). No weights are "
        "downloaded. Of this machine it counts what is free now; the other options put another in its place.",
    )
    inference.add_argument("--inference", action="store_true", help="where the weights fit, in place of training")
    for name, metavar, what in (
        ("gpu_memory", "SIZES", "of each GPU, as 15GiB,15GiB; 0B for none"),
        ("cpu_memory", "SIZE", "of the host, as 30GiB"),
        ("disk", "SIZE", "free for files of weights, as 20GB"),
    ):
        action = inference.add_argument(f"--{name}", f"--{name.replace('_', '-')}", metavar=metavar, help=what)
        action.option_strings = [f"--{name.replace('_', '-')}"]
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _run(arguments: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    from torch._subclasses.fake_tensor import FakeTensorMode

    from nb_accelerate.errors import ConfigError

    others = ("batch_size", "sequence_length") if arguments.inference else ("gpu_memory", "cpu_memory", "disk")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name) is not None]
    if given:
        raise ConfigError(f"{given[0]} counts {'without' if arguments.inference else 'with'} --inference only")
    sys.path.insert(0, str(Path.cwd()))  # where module:Class of one's own lies
    if ":" not in arguments.model and not Path(arguments.model).exists():
        print(f"reading the configuration of {arguments.model} from the Hub", file=sys.stderr, flush=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if arguments.inference:
            _print_inference(arguments)
        else:
            _print_training(arguments)
    return 0


def _print_training(arguments: argparse.Namespace) -> None:
    import torch

    from nb_accelerate.training.bigmodel.estimate import estimate_memory, largest_layer, make_model, token_inputs
    from nb_accelerate.training.bigmodel.map_picture import size

    batch_size, sequence_length = arguments.batch_size, arguments.sequence_length
    inputs = None
    if batch_size or sequence_length:
        batch_size, sequence_length = batch_size or 1, sequence_length or 512
        inputs = token_inputs(batch_size, sequence_length)
    rows: list[Sequence[str]] = []
    for precision in arguments.precisions:
        dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
        model = make_model(arguments.model, dtype)
        if not rows:
            bytes_, name = largest_layer(model)
            number = sum(parameter.numel() for parameter in model.parameters())
            print(f"{type(model).__name__}: {number:,} parameters; the largest layer is {name}, {size(bytes_)}")
        memory = estimate_memory(model, precision, inputs)
        of_parts = (memory.weights, memory.gradients, memory.adam, memory.activations)
        sizes = (*of_parts, memory.training, memory.distributed)
        rows.append((precision, *("not asked" if number is None else size(number) for number in sizes)))
    if inputs is not None:
        print(f"activations of {batch_size} x {sequence_length} tokens")
    _print_table((_COLUMNS, *rows))


def _print_inference(arguments: argparse.Namespace) -> None:
    import torch

    from nb_accelerate.training.bigmodel.estimate import make_model
    from nb_accelerate.training.bigmodel.inference import PRECISIONS, estimate_fit, kv_cache
    from nb_accelerate.training.bigmodel.map_picture import size

    limits, disk = _machine(arguments)
    model = make_model(arguments.model, torch.float16)
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__}: {number:,} parameters")
    fits = [estimate_fit(model, precision, limits) for precision in PRECISIONS]
    a_token = kv_cache(getattr(model, "config", None))
    if a_token is not None:
        print(f"KV cache: {size(1000 * a_token)} for 1,000 tokens of a sequence, in float16")
    files = 2 * number
    room = "more than" if files > disk else "within"
    print(f"files: {size(files)} in 16 bits, {room} the {size(disk)} of disk that are free")
    limits_shown = fits[0].shown.limits
    titles = ("precision", "weights", *limits_shown, "disk", "largest visitor")
    rows = [
        (
            fit.precision,
            size(fit.weights),
            *(fit.cells.get(place, "-") for place in (*limits_shown, "disk")),
            size(fit.visitor) if fit.visitor else "-",
        )
        for fit in fits
    ]
    has = ("", "", *(f"of {size(limit)}" for limit in limits_shown.values()), f"of {size(disk)}", "")
    _print_table((titles, has, *rows))
    for fit in fits:
        print(f"{fit.precision}: {fit.sentence}")


def _machine(arguments: argparse.Namespace) -> tuple[dict[int | str, int], int]:
    """Return the bytes of each device for a model, and those of the disk: of this machine, but for what is told."""
    import shutil
    from pathlib import Path

    from nb_accelerate.training.bigmodel.device_memory import limits_for
    from nb_accelerate.training.bigmodel.sizes import convert_file_size_to_int

    gpus, host = arguments.gpu_memory, arguments.cpu_memory
    limits = {} if gpus and host else limits_for(None)
    if gpus:
        told = map(convert_file_size_to_int, gpus.split(","))
        limits = {**dict(enumerate(told)), "cpu": limits.get("cpu", 0)}
    if host:
        limits["cpu"] = convert_file_size_to_int(host)
    if arguments.disk:
        return limits, convert_file_size_to_int(arguments.disk)
    return limits, shutil.disk_usage(Path.home()).free


def _print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        numbers = (f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True))
        print("  ".join((f"{first:<{widths[0]}}", *numbers)).rstrip())
