"""`Converted`: the block in which a cell that is written for one process runs on all ranks, with its numbers.

All ranks run all of the cell, with equal random numbers, and so see equal batches, losses and totals. What they share
is the work of loaders and models: each rank reads and computes a part of the rows, and all get the whole::

    for x in loader -> rows that this rank reads -> joined rows of all ranks
    time.time(), open("log.txt", "w") -> those of rank 0
    model(x) -> tried once (trial.py) -> this rank's rows (rows.py) -> forward -> joined rows of all ranks
    loss.backward() -> gradients -> their mean over ranks (models.py) -> clipping, scaler, optimizer: the user's own

Before anything is exchanged, ranks compare where they are (order.py). What is a model, and what backward is called on,
is seen when it happens; the cell's text is not read.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import io
import os
import random
import re
import sys
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.errors import ConfigError
from nb_accelerate.errors.traceback_lines import is_users_file
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.comm.operations import communicate_packed
from nb_accelerate.training.convert.models import SharedModels, refuse_wrapper
from nb_accelerate.training.convert.order import Order, line_here
from nb_accelerate.training.data import prepare_data_loader
from nb_accelerate.training.process import rng
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.pytree import map_tensors, tensors_in
from nb_accelerate.training.strategies.select import unchecked_collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data import DataLoaderShard


# Functions whose numbers are those of rank 0 where a user's line calls them.
_NUMBERS = [
    *((time, name + unit) for name in ("time", "perf_counter", "monotonic", "process_time") for unit in ("", "_ns")),
    (os, "getpid"),
]

# Functions that take a seed from the system if they are given none.
_SEEDS: list[tuple[Any, str]] = [(random, "seed"), (np.random, "seed"), (np.random, "default_rng")]

# Functions of `os` that change folders; those of shutil and pathlib call them.
_CHANGES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace")


class RankZero:
    """Puts functions in the place of Python's whose results are not the same on all ranks: the clock, files, answers.

    All ranks see the clock of rank 0; and where all of them change the same file or folder, rank 0 does, when all have
    come there. What they find on disk in between is the same for all::

        rank 0: open("log.txt", "a") --- all are here ---> the file           ---> all go on
        rank 1: open("log.txt", "a") --- all are here ---> writes to nothing  ---> all go on
    """

    def __init__(self, names: dict[str, Any], order: Order, collectives: Collectives) -> None:
        self._names, self._order, self._collectives = names, order, collectives
        self._written = set[str]()
        self._is_on = False
        plain = {(owner, name): getattr(owner, name) for owner, name in [*_NUMBERS, *_SEEDS]}
        self._ours: dict[tuple[Any, str], Any] = {
            **{place: self._number(function) for place, function in plain.items() if place in _NUMBERS},
            **{place: self._seeded(function) for place, function in plain.items() if place in _SEEDS},
            **{(os, name): self._change(getattr(os, name)) for name in _CHANGES},
            (builtins, "input"): self._input(builtins.input),
            (builtins, "open"): self._open(builtins.open),
        }
        self._ours[io, "open"] = self._ours[builtins, "open"]
        self._plain = {(owner, name): getattr(owner, name) for owner, name in self._ours}

    def begin(self) -> None:
        """Put the functions in place, also where a cell has imported them by name."""
        self._is_on = True
        self._exchange(self._plain, self._ours)

    def end(self) -> None:
        """Take them away."""
        self._is_on = False
        self._exchange(self._ours, self._plain)

    def _exchange(self, old: dict[tuple[Any, str], Any], new: dict[tuple[Any, str], Any]) -> None:
        for (owner, name), function in new.items():
            setattr(owner, name, function)
        by_id = {id(function): new[place] for place, function in old.items()}
        for name, value in list(self._names.items()):
            if id(value) in by_id:
                self._names[name] = by_id[id(value)]

    @property
    def _counts(self) -> bool:
        """Whether what is done now is done by all ranks, in the same order."""
        return self._is_on and not self._order.is_inside and self._order.is_here

    def _is_asked(self) -> bool:
        """Whether a user's line has called the function that asks this."""
        return is_users_file(sys._getframe(2).f_code.co_filename) and self._counts  # noqa: SLF001 - as `warnings` does

    def _number(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def number_of_rank_0() -> Any:
            value = plain()
            if not self._is_asked():
                return value
            return type(value)(self._order.meet(plain.__name__, value=value)[0])

        return number_of_rank_0

    def _seeded(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            if (args or kwargs) or not self._is_asked():
                return plain(*args, **kwargs)
            mine = int.from_bytes(os.urandom(4), "little")
            return plain(int(self._order.meet(f"{plain.__name__} without a seed", value=mine)[0]))

        return seeded

    def _input(self, plain: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(plain)
        def answer_of_rank_0(*args: Any) -> str:
            if not self._is_asked():
                return plain(*args)
            self._order.meet("input")
            answer = plain(*args) if self._collectives.rank == 0 else ""
            return str(self._collectives.broadcast_objects([answer], 0)[0])

        return answer_of_rank_0

    def is_same(self, what: str, path: str, folder: int | None = None) -> bool:
        """Wait for all ranks; return whether all mean the same file. Numbers in its name may be times and processes."""
        inode = "" if folder is None else os.fstat(folder).st_ino
        mine = zlib.crc32((re.sub(r"\d+", "", path) + f" in {inode}").encode(errors="surrogateescape"))
        return len(set(self._order.meet(what, value=mine))) == 1

    def _change(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def change(*args: Any, **kwargs: Any) -> None:
            given = [os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
            paths = [os.path.abspath(path) for path in given]  # noqa: PTH100 - text
            if not (self._counts and paths):
                return plain(*args, **kwargs)
            if not self.is_same(f"os.{plain.__name__}", "\n".join(paths), kwargs.get("dir_fd")):
                return plain(*args, **kwargs)
            error: OSError | None = None
            if self._collectives.rank == 0:
                try:
                    plain(*args, **kwargs)
                except OSError as caught:
                    error = caught
            error = self._collectives.broadcast_objects([error], 0)[0]
            if error is not None:
                raise error
            return None

        return change

    def _open(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = bool(set(mode) & set("wax+"))
            nothing = functools.partial(plain, os.devnull, mode.replace("x", "w"), *args, **kwargs)
            if not isinstance(file, (str, bytes, os.PathLike)) or kwargs.get("opener") is not None:
                return plain(file, mode, *args, **kwargs)
            if not self._counts:
                # Ranks cannot wait for another thread, of a writer for TensorBoard say.
                in_thread = self._is_on and self._order.is_in_another_thread
                return (
                    nothing() if in_thread and writes and self._collectives.rank else plain(file, mode, *args, **kwargs)
                )
            path = os.fsdecode(os.path.realpath(file))
            if not writes:
                if path in self._written:
                    self._order.meet("a file that was written")
                return plain(file, mode, *args, **kwargs)
            if not self.is_same("open for writing", path):
                return plain(file, mode, *args, **kwargs)
            self._written.add(path)
            opened = plain(file, mode, *args, **kwargs) if self._collectives.rank == 0 else nothing()
            self._order.meet("open for writing")
            return opened

        return open_


class Converted(contextlib.AbstractContextManager["Converted"]):
    """Share the models' work of what runs inside the block."""

    def __init__(self, names: dict[str, Any]) -> None:
        process = setup_process()
        if process.kind.make_collectives is not None:
            raise ConfigError(f"--convert is not for {process.kind.label}s. Prepare model and loader by an Accelerator")
        self._kind = process.kind
        # Not the collectives that check operations on their own: `Order` has compared more.
        self._collectives = unchecked_collectives(process)
        self._order = Order(self._collectives)
        self._rank_zero = RankZero(names, self._order, self._collectives)
        self._loaders = weakref.WeakKeyDictionary[DataLoader[Any], "DataLoaderShard | None"]()
        self._plain: dict[tuple[Any, str], Any] = {}
        self._ours: dict[tuple[Any, str], Any] = {}
        self.models = SharedModels(process, self._collectives, self._order, names)
        for name, value in list(names.items()):
            # What is on the notebook's GPU moves to the rank's; what is on the CPU stays there.
            if isinstance(value, torch.device) and self.models.is_of_another_rank(value):
                names[name] = process.device
            elif isinstance(value, nn.Module) and any(
                self.models.is_of_another_rank(parameter.device) for parameter in value.parameters()
            ):
                value.to(process.device)

    def __enter__(self) -> Converted:
        if self._collectives.world_size == 1:
            return self
        states = rng.capture(self._kind, all_devices=False)
        rng.restore(self._collectives.broadcast_objects([states], 0)[0], self._kind)

        self._ours = {
            # Functions, because a class binds no other callables to its instances.
            (nn.Module, "__call__"): lambda model, *args, **kwargs: self._call(model, args, kwargs),
            (DataLoader, "__iter__"): lambda loader: self._iterate(loader),  # noqa: PLW0108 - as above
            (Accelerator, "__init__"): _refuse,
            (DistributedDataParallel, "__init__"): refuse_wrapper,
            (torch.autograd, "backward"): self._backward,
            (torch.autograd, "grad"): self._grad,
            (torch, "save"): self._save,
        }
        self._plain = {(owner, name): getattr(owner, name) for owner, name in self._ours}
        self._patch(self._ours)
        self._rank_zero.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours = self._plain  # a batch may be read after the cell
        self._patch(self._ours)
        if self._collectives.world_size > 1:
            self._rank_zero.end()

    def report(self) -> None:
        """Wait for all ranks at the end of the cell, and say whose work was not shared, and why."""
        if self._collectives.world_size > 1:
            self._order.meet("the end of the cell")
        for name, line, rules in dict.fromkeys(self.models.rules.values()):
            print(f"--convert: in {name} (line {line}) {rules}", file=sys.stderr)  # noqa: T201 - of the cell
        who = f"each of the {self._collectives.world_size} ranks"
        for name, line, why in dict.fromkeys(self.models.unshared.values()):
            message = f"{who} computes all of {name} (line {line}), so they are no faster than one: {why}"
            print(f"--convert: {message}", file=sys.stderr)  # noqa: T201 - of the cell

    def _patch(self, functions: dict[tuple[Any, str], Any]) -> None:
        for (owner, name), function in functions.items():
            setattr(owner, name, function)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Let a model and backward run as they are: their layers, and what checkpoints compute again, are not cut."""
        self._patch(self._plain)
        self._order.is_inside = True
        try:
            yield
        finally:
            self._order.is_inside = False
            self._patch(self._ours)

    def _call(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        plain = self._plain[nn.Module, "__call__"]
        if (
            next(model.parameters(), None) is None
            or not self._order.is_here
            or torch.compiler.is_compiling()
            or torch._C._is_tracing()  # noqa: SLF001 - torch.jit.is_tracing, which has no type
            or torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001 - torch.func has no public way
        ):
            return plain(model, *args, **kwargs)
        if torch.is_grad_enabled():
            page = here()
            page.enter(Phase.FORWARD)
            page.saw_forward = True
        with self._inside():
            return self.models.call(model, plain, args, kwargs)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        page = here()
        page.enter(Phase.BACKWARD)
        page.trains()
        losses = tensors_in(args[0] if args else kwargs.get("tensors"))
        if self._order.is_here:
            self._order.meet("backward", losses)
        with self._inside():
            plain = self._plain[torch.autograd, "backward"]
            self.models.backward(losses, lambda: plain(*args, **kwargs))
        page.enter(Phase.RUNNING)

    def _grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        self.models.refuse_parameters(inputs)
        with self._inside():
            return self._plain[torch.autograd, "grad"](outputs, inputs, *args, **kwargs)

    def _save(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        """Save once to a file, which ranks do not read meanwhile."""
        is_path = self._order.is_here and isinstance(f, (str, os.PathLike))
        is_same = is_path and self._rank_zero.is_same("torch.save", os.path.realpath(f))
        if not is_same or self._collectives.rank == 0:
            with self._inside():
                self._plain[torch, "save"](obj, f, *args, **kwargs)
        if is_same:
            self._order.meet("torch.save")

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if not self._order.is_here:
            return self._plain[DataLoader, "__iter__"](loader)  # type: ignore[no-any-return]
        with self._inside():
            is_first = loader not in self._loaders
            if is_first:
                self._loaders[loader] = in_parts(loader, self._collectives, self._kind)
            parts = self._loaders[loader]
            if parts is None:
                return iter(loader)
            if is_first or not loader.persistent_workers:
                # torch draws this number when reading begins. The workers of each rank begin with another one.
                seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                parts.generator.manual_seed((int(seed) + self._collectives.rank) % 2**63)
        return self._wholes(parts, iter(parts))

    def _wholes(self, parts: DataLoaderShard, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            if not self._order.is_here:
                raise ConfigError("with --convert, batches are read by the thread of the cell. Read them there")
            with self._inside():
                part = next(batches, None)  # parts are of tensors
            self._order.meet("a batch" if part is not None else "the end of a loader")
            if part is None:
                return
            yield whole_batch(part, parts.batch_remainder, self._collectives)


def _refuse(_: Accelerator, **__: object) -> None:
    raise ConfigError(
        f"line {line_here()}: an Accelerator shares out rows itself. Run the cell without --convert, or leave the "
        "Accelerator out"
    )


def in_parts(loader: DataLoader[Any], collectives: Collectives, kind: DeviceKind) -> DataLoaderShard | None:
    """Return a loader of this rank's part of each batch; None if all ranks have to read all rows.

    They have to where batches are not made of rows that can be told from one another, users' code orders them, or
    this process draws random numbers for a row.
    """
    if (
        isinstance(loader.dataset, IterableDataset)
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
        or loader.collate_fn is not default_collate
        or (loader.batch_size or 1) % collectives.world_size
    ):
        return None
    states = rng.capture(kind, all_devices=False)
    undisturbed = _random_numbers()
    rng.restore(states, kind)
    try:
        tensors_in(default_collate([loader.dataset[0]]), strict=True)
        if not loader.num_workers and _random_numbers() != undisturbed:
            return None
        loader = copy.copy(loader)
        loader.generator = torch.Generator()
        return prepare_data_loader(loader, collectives=collectives, config=DataLoaderConfiguration(split_batches=True))
    except Exception:  # a dataset is users' code, and may have names as numbers, or texts in its rows
        return None
    finally:
        rng.restore(states, kind)


def _random_numbers() -> tuple[float, ...]:
    return random.random(), np.random.random_sample(), torch.rand(()).item()  # noqa: S311 - compared


def whole_batch(part: Any, real: int | None, collectives: Collectives) -> Any:
    """Return the whole batch from the part on each rank, cut to its first `real` rows: the others are repeated."""
    wholes = iter(communicate_packed(tensors_in(part), collectives.all_gather, collectives.world_size))
    return map_tensors(lambda _: next(wholes).flatten(0, 1)[:real], part)
