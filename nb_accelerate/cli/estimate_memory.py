"""`nb-accelerate estimate-memory`: how much memory training a model will take, or where it fits to compute only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

_PRECISIONS = ("no", "fp16", "bf16", "bf16 weights")
_COLUMNS = ("precision", "weights", "gradients", "Adam", "activations", "one process", "each of several")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "estimate-memory",
        help="how much memory a model will take: for training, or where it fits for inference",
        description="Count what training with Adam takes: weights, gradients, the optimizer's state and, for a batch "
        "that you describe, activations: the most that forward and backward hold at once beside these. No weights are "
        "loaded. The columns are what `Accelerator` needs with each mixed precision; 'bf16 weights' is a model "
        "that was turned into bf16 as a whole. Each of several processes has the whole model, and a copy of the "
        "gradients to communicate.",
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
        "What the weights take in each dtype, and where device_map='auto' puts them: within what is free on this "
        "machine, or within the sizes that are given. No weights are downloaded.",
    )
    inference.add_argument("--inference", action="store_true", help="where the weights fit, in place of training")
    for name, metavar, what in (
        ("gpu_memory", "SIZES", "of each GPU, as 15GiB,15GiB; 0B for none"),
        ("cpu_memory", "SIZE", "of the host, as 30GiB"),
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

    others = ("batch_size", "sequence_length") if arguments.inference else ("gpu_memory", "cpu_memory")
    flags = [f"--{name.replace('_', '-')}" for name in others if getattr(arguments, name) is not None]
    if flags:
        raise ConfigError(f"{flags[0]} counts {'without' if arguments.inference else 'with'} --inference only")
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

    from nb_accelerate.base.table import Table
    from nb_accelerate.base.words import size
    from nb_accelerate.training.bigmodel.estimate import estimate_memory, largest_layer, make_model, token_inputs

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
    print(Table(_COLUMNS, rows, right=_COLUMNS[1:]))


def _print_inference(arguments: argparse.Namespace) -> None:
    import torch

    from nb_accelerate.base.table import Table
    from nb_accelerate.base.words import size
    from nb_accelerate.training.bigmodel.device_map import planned_map
    from nb_accelerate.training.bigmodel.device_memory import limits_for
    from nb_accelerate.training.bigmodel.estimate import make_model
    from nb_accelerate.training.bigmodel.sizes import CustomDtype, compute_module_sizes, convert_file_size_to_int

    limits = limits_for(None)
    if arguments.gpu_memory:
        gpus = map(convert_file_size_to_int, arguments.gpu_memory.split(","))
        limits = {**dict(enumerate(gpus)), "cpu": limits.get("cpu", 0)}
    if arguments.cpu_memory:
        limits["cpu"] = convert_file_size_to_int(arguments.cpu_memory)
    model = make_model(arguments.model, torch.float16)
    rows = []
    for label, dtype in (("float16", torch.float16), ("int8", torch.int8), ("int4", CustomDtype.INT4)):
        sizes = compute_module_sizes(model, dtype=dtype)
        places = dict.fromkeys([*limits, "disk"], 0.0)
        for name, device in planned_map(model, limits, dtype=dtype).items():
            places[device] += sizes[name]
        cells = (size(taken) if taken else "-" for taken in places.values())
        rows.append((label, size(sizes[""]), *cells))
    titles = ("dtype", "weights", *(f"GPU {device}" if isinstance(device, int) else device for device in places))
    number = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__}: {number:,} parameters")
    print(Table(titles, rows, right=titles[1:]))
