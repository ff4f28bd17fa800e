"""`nb-accelerate estimate-memory`: how much memory training a model will take."""

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
        help="how much memory training a model will take",
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
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _run(arguments: argparse.Namespace) -> int:
    import sys
    from pathlib import Path

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from nb_accelerate.training.bigmodel.estimate import estimate_memory, largest_layer, make_model, token_inputs

    sys.path.insert(0, str(Path.cwd()))  # where module:Class of one's own lies
    batch_size, sequence_length = arguments.batch_size, arguments.sequence_length
    if ":" not in arguments.model and not Path(arguments.model).exists():
        print(f"reading the configuration of {arguments.model} from the Hub", file=sys.stderr, flush=True)
    inputs = None
    if batch_size or sequence_length:
        batch_size, sequence_length = batch_size or 1, sequence_length or 512
        inputs = token_inputs(batch_size, sequence_length)
    rows: list[Sequence[str]] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        for precision in arguments.precisions:
            dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
            model = make_model(arguments.model, dtype)
            if not rows:
                size, name = largest_layer(model)
                number = sum(parameter.numel() for parameter in model.parameters())
                print(f"{type(model).__name__}: {number:,} parameters; the largest layer is {name}, {_size(size)}")
            memory = estimate_memory(model, precision, inputs)
            of_parts = (memory.weights, memory.gradients, memory.adam, memory.activations)
            sizes = (*of_parts, memory.training, memory.distributed)
            rows.append((precision, *("not asked" if size is None else _size(size) for size in sizes)))
    if inputs is not None:
        print(f"activations of {batch_size} x {sequence_length} tokens")
    widths = [max(len(row[column]) for row in (_COLUMNS, *rows)) for column in range(len(_COLUMNS))]
    for first, *others in (_COLUMNS, *rows):
        numbers = (f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True))
        print("  ".join((f"{first:<{widths[0]}}", *numbers)))
    return 0


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"
