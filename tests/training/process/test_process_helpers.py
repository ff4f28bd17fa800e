"""What only some processes do, and what one process asks of its machine: decorators, loggers, bars, memory."""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import Any

import pytest
import torch

from nb_accelerate import Accelerator
from nb_accelerate.base.config.kwargs import ProfileKwargs
from nb_accelerate.compat.output import get_logger
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context, main_process
from nb_accelerate.training.process.memory import find_executable_batch_size, release_memory, should_reduce_batch_size
from nb_accelerate.utils import set_seed, tqdm

# --- decorators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [True, False])
def test_what_is_decorated_stays_what_it_is(here: bool):
    def plain(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    def counts(n: int):
        yield from range(n)
        return "end"

    async def waits(n: int) -> int:
        return n

    async def streams(n: int):
        for i in range(n):
            yield i

    only = {function.__name__: main_process.only_if(here, function) for function in (plain, counts, waits, streams)}
    assert inspect.signature(only["plain"]) == inspect.signature(plain)
    assert only["plain"].__doc__ == "Add."
    assert only["plain"](1) == (3 if here else None)
    assert list(only["counts"](3)) == ([0, 1, 2] if here else [])
    assert asyncio.run(only["waits"](5)) == (5 if here else None)

    async def collect() -> list[int]:
        return [item async for item in only["streams"](2)]

    assert asyncio.run(collect()) == ([0, 1] if here else [])


def test_a_generator_gets_what_is_sent_to_it():
    @Accelerator(cpu=True).on_main_process
    def echo():
        got = None
        while got != "stop":
            got = yield got

    talk = echo()
    assert [next(talk), talk.send(1), talk.send(2)] == [None, 1, 2]
    with pytest.raises(StopIteration):
        talk.send("stop")


def test_methods_of_all_kinds_can_be_decorated(run_ranks):
    def run():
        from nb_accelerate import Accelerator, PartialState

        accelerator, state = Accelerator(cpu=True), PartialState()

        class Worker:
            def __init__(self):
                self.seen = []

            @accelerator.on_main_process
            def method(self, value):
                self.seen.append(value)
                return value

            @state.on_last_process
            @staticmethod
            def fixed(value):
                return value

            @accelerator.on_process(process_index=1)
            @classmethod
            def built(cls, value):
                return cls.__name__, value

            @accelerator.on_local_process(local_process_idx=1)
            def local(self):
                return "local"

            @state.on_local_main_process
            def pieces(self):
                yield from "ab"

        worker = Worker()
        results = worker.method(1), worker.fixed(2), Worker.built(3), worker.local(), list(worker.pieces())
        return results, worker.seen

    assert run_ranks(run) == [((1, None, None, None, ["a", "b"]), [1]), ((None, 2, ("Worker", 3), "local", []), [])]


def test_an_error_in_the_process_that_goes_first_lets_the_others_go_on(run_ranks):
    def run():
        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        try:
            with accelerator.main_process_first():
                if accelerator.is_main_process:
                    raise RuntimeError("download failed")
                return "went on"
        except RuntimeError as error:
            return str(error)

    assert run_ranks(run) == ["download failed", "went on"]


# --- loggers and bars -----------------------------------------------------------------------------------------------


def test_a_logger_names_the_callers_line(caplog):
    logger = get_logger("somewhere", log_level="info")
    try:
        logger.info("hello %s", "you")
        line = inspect.currentframe().f_lineno - 1
        logger.log(logging.INFO, "again")
        logger.warning_once("once")
        logger.warning_once("once")
    finally:
        logging.getLogger("somewhere").setLevel(logging.NOTSET)
        logging.root.setLevel(logging.WARNING)
    assert [record.getMessage() for record in caplog.records] == ["hello you", "again", "once"]
    assert [record.filename for record in caplog.records] == ["test_process_helpers.py"] * 3
    assert [record.lineno for record in caplog.records] == [line, line + 2, line + 3]
    assert context.current() is None  # logging connects nothing


def test_loggers_of_ranks_speak_once_all_or_in_turn(run_ranks, tmp_path):
    def run(path):
        import logging
        import time

        from nb_accelerate import Accelerator
        from nb_accelerate.logging import get_logger

        logger = get_logger("ranks", log_level="INFO")
        handler = logging.FileHandler(path)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logging.getLogger("ranks").addHandler(handler)
        rank = Accelerator(cpu=True).process_index
        logger.info("main only %d", rank)
        time.sleep(0.2 * (1 - rank))  # the later rank would speak first
        logger.info("turn %d", rank, main_process_only=False, in_order=True)
        if rank == 1:
            logging.getLogger("ranks").setLevel("ERROR")
        logger.info("quiet %d", rank, main_process_only=False, in_order=True)  # nobody waits for ever
        handler.close()

    run_ranks(run, str(tmp_path / "log"))
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.startswith("turn")] == ["turn 0", "turn 1"]
    assert [line for line in lines if not line.startswith("turn")] == ["main only 0", "quiet 0"]


@pytest.mark.may_leave("threads")  # tqdm's monitor, which lives as long as the process
def test_a_bar_shows_on_the_first_process_only(run_ranks):
    def run():
        from nb_accelerate.utils import tqdm

        return tqdm(range(3)).disable, tqdm(range(3), main_process_only=False).disable

    assert run_ranks(run) == [(False, False), (True, False)]
    assert tqdm(range(3), disable=True).disable
    with pytest.raises(TypeError, match=r"tqdm\(items, main_process_only=True\)"):
        tqdm(True, range(3))


# --- memory ---------------------------------------------------------------------------------------------------------


def _out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_out_of_memory(), True),
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error: Exception, expected: bool):
    assert should_reduce_batch_size(error) is expected


def test_torchs_own_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def test_a_batch_size_is_found_and_kept():
    tried = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, model: str, *, epochs: int) -> str:
        tried.append(batch_size)
        if batch_size > 80:
            raise _out_of_memory()
        return f"{model} {batch_size} {epochs}"

    assert train("net", epochs=2) == "net 72 2"
    assert tried == [100, 90, 81, 72]
    assert train("net", epochs=3) == "net 72 3"
    assert len(tried) == 5


def test_a_method_gets_its_batch_size_and_a_rule_of_ones_own():
    sizes = iter([16, 4])

    class Trainer:
        @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: next(sizes))
        def fit(self, batch_size: int, data: str) -> tuple[int, str]:
            if batch_size > 8:
                raise MemoryError
            return batch_size, data

    assert Trainer().fit("rows") == (4, "rows")


def test_other_errors_pass_and_no_size_at_all_is_said():
    @find_executable_batch_size(starting_batch_size=2)
    def broken(batch_size: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        broken()

    @find_executable_batch_size(starting_batch_size=2)
    def huge(batch_size: int) -> None:
        raise MemoryError

    with pytest.raises(RuntimeError, match="2 down to 1"):
        huge()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: find_executable_batch_size(lambda: None), "takes no batch size"),
        (
            lambda: find_executable_batch_size(lambda batch_size, model: None)(8, "net"),
            r"you. Write.*\(model",
        ),
        (lambda: find_executable_batch_size(lambda batch_size: None, starting_batch_size=0), "starting_batch_size=0"),
    ],
)
def test_a_wrong_use_says_what_to_write(call: Any, text: str):
    with pytest.raises((TypeError, ConfigError), match=text):
        call()


def test_memory_is_released_as_many_times_as_objects_are_given():
    a, b = release_memory(torch.zeros(3), [1])
    assert (a, b) == (None, None)


# --- seeds ----------------------------------------------------------------------------------------------------------


def test_a_deterministic_seed_tells_torch():
    try:
        set_seed(3, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_random_states_are_those_of_the_first_process(run_ranks):
    def run():
        import torch

        from nb_accelerate import Accelerator, set_seed, synchronize_rng_states
        from nb_accelerate.utils import synchronize_rng_state

        Accelerator(cpu=True)
        set_seed(5, device_specific=True)
        own = torch.Generator().manual_seed(torch.initial_seed())
        apart = torch.rand(1).item(), torch.rand(1, generator=own).item()
        synchronize_rng_states(["torch", "generator"], own)
        together = torch.rand(1).item(), torch.rand(1, generator=own).item()
        set_seed(5, device_specific=True)
        synchronize_rng_state("torch")
        return apart, together, torch.rand(1).item()

    first, second = run_ranks(run)
    assert first[0][0] != second[0][0]
    assert first[0][1] != second[0][1]
    assert first[1:] == second[1:]


# --- profiles -------------------------------------------------------------------------------------------------------


def test_each_process_writes_a_trace(run_ranks, tmp_path):
    def run(folder):
        import os

        import torch

        from nb_accelerate import Accelerator, ProfileKwargs

        options = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        with accelerator.profile() as profiler:
            torch.ones(8, 8) @ torch.ones(8, 8)
        return sorted(os.listdir(folder)), "aten::mm" in {event.key for event in profiler.key_averages()}

    assert run_ranks(run, str(tmp_path)) == [(["profile_0.json", "profile_1.json"], True)] * 2


def test_a_schedule_records_the_steps_it_names():
    ready = []
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
    )
    with Accelerator(cpu=True).profile(options) as profiler:
        for _ in range(5):
            torch.ones(2) + 1
            profiler.step()
    assert ready == [4]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"activities": "gpu"}, "'gpu' is not a choice"),
        ({"activities": ["gpu"]}, "Write one of: 'cpu'"),
        ({"schedule_option": {"activ": 1}}, "Did you mean 'active'"),
        ({"with_stack": "no"}, "with_stack='no'"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(fields: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        ProfileKwargs(**fields)
