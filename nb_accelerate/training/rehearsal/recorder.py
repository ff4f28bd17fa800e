"""`Recorder`: what a rehearsed rank writes down, and what the training half asks of it while it trains."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from nb_accelerate.errors.traceback_lines import is_ours, is_users_file
from nb_accelerate.training.comm import torch_distributed
from nb_accelerate.training.data.dispatching.batch_parts import CountedBatch, count_rows, take_from
from nb_accelerate.training.data.reading.iterable import LastBatch
from nb_accelerate.training.precision import OptimizerStep
from nb_accelerate.training.process.live_bytes import LiveBytes, tensors_in
from nb_accelerate.training.process.shapes_only import Ran, is_large, run_operation
from nb_accelerate.training.pytree import map_tensors
from nb_accelerate.training.rehearsal.devices import on_cpu
from nb_accelerate.training.rehearsal.exchanges import Collective, RehearsedCollectives, WatchedCall, described
from nb_accelerate.training.rehearsal.files import frames, user_call
from nb_accelerate.training.rehearsal.memory import Mark, Zero, points
from nb_accelerate.training.rehearsal.report import Exchange, Pass
from nb_accelerate.training.strategies.sharding import local_part
from nb_accelerate.training.strategies.unwrapping import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.rehearsal.exchanges import Tape
    from nb_accelerate.training.rehearsal.files import Files
    from nb_accelerate.training.rehearsal.report import Line, Trace


# Operations that draw numbers, and functions, of torch and of transformers, that draw the first weights of a layer or a
# model: which they are makes no difference here.
_DRAWS = ("aten::normal_", "aten::uniform_")
_INITIALIZES = ("reset_parameters", "_init_weights", "_initialize_weights", "init_weights")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a `Trace`. `training.process.context.rehearsal` has it, in a process that rehearses a rank.

    As a mode of torch, which is not public, it sees all collectives that torch runs.
    """

    def __init__(
        self, trace: Trace, ranks: Sequence[int], tape: Tape | None, files: Files, device: int, divisor: int = 1
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.files = files
        self.on_cpu = on_cpu
        self._device = device  # the number of its own
        self._ranks = ranks
        self._tape = tape
        self._divisor = divisor  # of the rows of batches: 1, but where only memory is asked for
        self._zero: Zero | None = None
        self._weights = self._trained = 0  # their numbers
        self._width = 4  # bytes of a weight, where DeepSpeed keeps it
        self._pass = Pass(("", 0))
        self._is_apart = False
        self._saved = set[str]()
        self._live = LiveBytes()
        self.device_of = self._live.device_of
        self._marks: list[Mark] = []
        self._sent: dict[str, float] = {}  # since the last step
        self._computed = [0.0, 0.0]  # likewise: operations on numbers of 16 bits, and of 32
        self._phase = ""
        self._invents = False  # whether anything was not computed

    @property
    def is_fast(self) -> bool:
        """Whether nothing is computed any more, but models return what they did before: from the third step on."""
        return min(filter(None, map(len, self.trace.rates)), default=0) >= 2

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # noqa: SLF001 - no public name
            return func(*args, **kwargs)  # DTensor looks for the shape of what it will make
        if any(each.__torch_dispatch__ is not Tensor.__torch_dispatch__ for each in types):  # such as DTensor
            return NotImplemented  # it takes itself apart, and this is called again with the plain tensors in it
        schema = func._schema  # noqa: SLF001 - as modes of torch do
        name: str = schema.name
        tensors = tensors_in(args, kwargs)
        in_backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - nothing else tells
        devices = [device for each in tensors if (device := self._live.device_of(each)) is not None]
        target = getattr(kwargs.get("device"), "index", None)  # the CPU has a number where it stands for another device
        device = target if target is not None else next(iter(devices), self._device)
        if self._phase or in_backward or devices or target is not None:
            if name == "aten::_local_scalar_dense":
                self._read()
            self._follow_backward(in_backward)
            result, ran = run_operation(func, args, kwargs)
            self._invents |= ran is Ran.FOR_SHAPES
            if self._invents and ran is Ran.BY_VALUES:
                self.note(f"{name}: the shape of what it returns depends on numbers that were not computed")
            if (operations := _operations(func, name, args, kwargs, result)) > 0:
                self._computed[tensors_in(result)[0].element_size() > 2] += operations
            if self._phase != "prepare" or target is not None:  # what stays is seen later; the rest may be on the host
                if name.startswith("aten::_foreach_"):  # of tensors on any device
                    for made, one in zip(tensors_in(result), args[0], strict=False):
                        on = self._live.device_of(one)
                        self._live.see([made], device=device if on is None else on)
                self._live.see(tensors_in(result), "gathered" if name.startswith("fsdp::") else "", device)
        elif name in _DRAWS and any(frame.f_code.co_name in _INITIALIZES for frame in frames()):
            result = run_operation(func, args, kwargs)[0]
        else:
            result = func(*args, **kwargs)
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            named = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
            self._exchanged(Collective(name.rpartition("::")[2].strip("_"), named))
        return result

    def collectives(self, device: torch.device) -> Collectives:
        """Return collectives that exchange nothing. Asked in place of those of the process."""
        return RehearsedCollectives(device, self.tell)

    def tell(self, what: str) -> None:
        """Write down something that all ranks do together."""
        if not self._is_apart:
            self.trace.exchanges.append(Exchange(what, *user_call()))
            if self._tape is not None:
                self._tape.of_rank_0("")  # others are never before it, and find what it has written

    def _follow_backward(self, in_backward: bool) -> None:
        """Mark where a backward begins and ends; what is kept for it are the activations."""
        if in_backward is not (bool(self._marks) and self._marks[-1].what == "the backward"):
            if in_backward:
                self._live.label_rest("activations")
                self._mark("the backward")
            elif self._marks and self._marks[-1].what == "the backward":
                self._mark("what follows the backward")

    def _mark(self, what: str) -> None:
        if not self._live.is_logging:
            return
        rows = self._pass.rows[-1] if self._pass.rows else 0
        step = len(max(self.trace.rates, key=len, default=())) + 1
        self._marks.append(Mark(len(self._live.changes), what, step, rows))

    def send(self, operation: str, size: float, ranks: int) -> None:
        """Count what this rank sends for a collective: around a ring, as NCCL does."""
        shares = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
        self._sent[operation] = self._sent.get(operation, 0) + size * shares.get(operation, (ranks - 1) / ranks)

    def see_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Count what a prepared model is given, which is on the device in any case."""
        self._live.see(tensors, device=self._device)

    def exchange_bucket(self, bucket: Tensor) -> None:
        """Count a bucket of gradients that all ranks reduce."""
        self._live.see([bucket], "buckets", self._device)
        self.send("all_reduce", bucket.nbytes, dist.get_world_size())

    def resized(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``UntypedStorage.resize_`` that is logged: with it FSDP frees weights that it has gathered."""

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            self._live.resized(storage, "gathered")
            return done

        return resized

    def _exchanged(self, collective: Collective) -> None:
        self.send(*collective.largest)
        name, compares = collective.name, True
        for frame in frames():
            filename = frame.f_code.co_filename
            if "/torch/distributed/fsdp/" in filename or filename.endswith("/torch/nn/parallel/distributed.py"):
                return  # `WatchedCall` tells of whole forwards and backwards
            if filename.endswith("/distributed_c10d.py"):
                name = frame.f_code.co_name
            if filename == torch_distributed.__file__ or "object" in name or name.startswith(("barrier", "all_to_all")):
                compares = False  # `RehearsedCollectives.verify` has; objects, and what goes to each, have other sizes
            if is_users_file(filename):
                break
        if not collective.is_of_all:
            self.note("what only some ranks exchange, in a group of their own or by send and recv, is not compared")
            return
        if self._tape is not None and collective.arguments.get("root_rank") == 0:
            are_weights = self._phase == "prepare" and any(map(is_large, collective.given))
            if not are_weights:  # which the others keep as they made them
                self._tape.carry(collective, self._ranks, self.trace.rank)
        compared = collective.tensors("output_tensors") if collective.name == "scatter" else collective.given
        self.tell(f"{name} of {', '.join(map(described, compared))}" if compares else name)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let ranks do what they like in a block, as where they join with uneven inputs."""
        self.tell("join_uneven_inputs")
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False
        self.tell("the end of join_uneven_inputs")

    def _read(self) -> None:
        """Write down the line that reads a number which was not computed."""
        if not (self.is_fast or self._invents):
            return
        line: Line | None = None
        for frame in frames():
            filename = frame.f_code.co_filename
            if "/torch/utils/data/" in filename or (line is None and is_ours(filename)):
                return  # of a row, which is real, or of what ranks exchange
            if line is None and is_users_file(filename):
                line = filename, frame.f_lineno
        if line is not None:
            self.trace.invented[line] = None

    def placement(self, place: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
        """Begin a pass over a prepared loader; return what places its batches. Asked in place of ``place`` alone."""
        begun = Pass(user_call()[0])
        self.trace.passes.append(begun)

        def placed(batch: Any) -> Any:
            rows = count_rows(batch.batch if type(batch) is LastBatch else batch) or 0
            if self._divisor > 1 and (take := take_from([CountedBatch(batch, rows)], careful=False)) is not None:
                rows = max(1, rows // self._divisor)
                batch = map_tensors(Tensor.clone, take(slice(rows)))  # else the whole batch stays in memory
            begun.rows.append(rows)
            begun.since_step += rows
            self._pass = begun
            batch = batch if place is None else place(batch)
            self._live.see(tensors_in(batch), device=self._device)
            return batch

        return placed

    def watched(self, step: OptimizerStep) -> OptimizerStep:
        """Return what takes the steps of a prepared optimizer. Asked in place of ``step`` alone."""
        rates: list[float] = []
        self.trace.rates.append(rates)
        return _WatchedStep(step, rates, self)

    def step(self, step: OptimizerStep) -> Any:
        """Take a step of an optimizer, and see its gradients and its state."""
        parameters = list(parameters_of(step.optimizer))
        self._live.see(
            (local_part(each.grad) for each in parameters if each.grad is not None), "gradients", self._device
        )
        by_default = [group for group in step.optimizer.param_groups if group.get("foreach", True) is None]
        for group in by_default:
            group["foreach"] = not group.get("fused")  # as on GPUs, which takes the memory of another copy or two
        with self.phase("the optimizer's step"):
            taken = step()
        for group in by_default:
            group["foreach"] = None
        self._live.see(map(local_part, tensors_in(list(step.optimizer.state.values()))), "optimizer", self._device)
        return taken

    def stepped(self, rates: list[float], rate: float) -> None:
        """Write down a step of an optimizer, after it was taken."""
        rates.append(rate)
        if rates is self.trace.rates[0]:
            self.trace.step_rows.append(self._pass.since_step)
            self._pass.since_step = 0
            if self._live.is_logging:
                self.trace.sent, self._sent = self._sent if self._zero is None else {}, {}
                self.trace.computed, self._computed = (self._computed[0], self._computed[1]), [0.0, 0.0]
        self._pass.steps += 1
        if self._live.is_logging:
            self._mark("what follows the step")
            if self.is_fast:
                held = {each: points(self._live, self._marks, each) for each in {*self._live.devices.values()}}
                fullest = max(held, key=lambda each: max(map(sum, held[each][0])))
                self.trace.memory, self.trace.marks = held[fullest]
                self.trace.fullest = f" on device {fullest}, the fullest of {len(held)}" if len(held) > 1 else ""
                self._live.is_logging = False
                if self._zero is not None:
                    state = max(held.optimizer for held in self.trace.memory)
                    of_model = self._weights, self._trained, self._width, state
                    self.trace.memory = [self._zero.applied(held, *of_model) for held in self.trace.memory]
                if self._divisor > 1:
                    signal.raise_signal(signal.SIGALRM)  # nothing else is asked of this one

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Take what is made in a block as made on the device."""
        before, self._phase = self._phase, name
        self._mark(name)
        try:
            yield
        finally:
            self._phase = before
            self._mark(before or f"what follows {name}")
            if name == "prepare":
                self._sent = {}  # once, and not in each step

    def uses_deepspeed(self, plugin: DeepSpeedPlugin) -> None:
        """Count weights, gradients and the state of optimizers as DeepSpeed shards them; exchange as without it."""
        devices = {"weights": plugin.offload_param_device, "optimizer": plugin.offload_optimizer_device}
        offloads = tuple(name for name, device in devices.items() if device not in (None, "none"))
        self._zero = Zero(plugin.stage, dist.get_world_size(), offloads)
        formulas = "weights, gradients and the optimizer's state are counted by the formulas of ZeRO"
        self.note(f"DeepSpeed was rehearsed as DistributedDataParallel: {formulas}, what it exchanges is not in this")

    def watch_model(self, model: Any, *, is_sharded: bool, precision: str) -> None:
        """Watch the calls of a prepared model."""
        self._width = 4 if precision == "no" else 2
        self._weights += sum(each.numel() for each in model.parameters())
        self._trained += sum(each.numel() for each in model.parameters() if each.requires_grad)
        wrapped = getattr(model, "_orig_mod", model)
        if wrapped is not model:
            self.note("torch.compile: the model was rehearsed without being compiled")
        self._live.see(map(local_part, (*wrapped.parameters(), *wrapped.buffers())), "weights", self._device)
        # What torch calls in place of a model; see `training.accelerator.losses`.
        vars(model)["_compiled_call_impl"] = WatchedCall(model, self, is_sharded=is_sharded)

    def note(self, text: str) -> None:
        """Write down, once, what could not be rehearsed."""
        self.trace.notes[text] = None

    def saves(self, folder: Path, collectives: Collectives) -> None:
        """Do what ranks do together when they save to a folder, and write nothing."""
        if collectives.world_size > 1:
            self.tell("save_state")
        self._saved.add(str(Path(folder).absolute()))

    def loads(self, folder: Any) -> bool:
        """Return whether a folder, or the newest, was saved in this rehearsal, so that there is nothing to load."""
        newest = folder is None or folder == "latest"
        if not (self._saved if newest else str(Path(folder).absolute()) in self._saved):
            return False
        self.tell("load_state")
        return True


class _WatchedStep(OptimizerStep):
    """Takes the steps of an optimizer while anything is computed, and tells of all."""

    def __init__(self, step: OptimizerStep, rates: list[float], recorder: Recorder) -> None:
        super().__init__(step.optimizer)
        self._step = step
        self._rates = rates
        self._recorder = recorder
        self.discard = step.discard  # type: ignore[method-assign]

    @property
    @override
    def skipped(self) -> bool:  # type: ignore[override]
        return self._step.skipped and not self._recorder.is_fast

    @property
    @override
    def unscales(self) -> bool:  # type: ignore[override]
        return self._step.unscales and not self._recorder.is_fast

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        rate = float(self.optimizer.param_groups[0]["lr"])
        if closure is not None:  # how often it is called depends on values, which are not those of a run
            self._recorder.note("an optimizer with a closure, such as LBFGS: it was called once a step, and took none")
            taken: Any = closure()
        else:
            taken = None if self._recorder.is_fast else self._recorder.step(self._step)
        self._recorder.stepped(self._rates, rate)
        return taken

    @override
    def unscale(self) -> None:
        if not self._recorder.is_fast:
            self._step.unscale()


def _operations(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return how many operations a matrix product, a convolution or attention takes; 0 for all else."""
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return sdpa_flop_count(*(each.shape for each in args[:3]))  # type: ignore[no-untyped-call, no-any-return]
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        return sdpa_backward_flop_count(*(each.shape for each in args[:4]))  # type: ignore[no-untyped-call, no-any-return]
    count = flop_registry.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=result)
