"""Blocks whose weights come to a device while another one computes there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.usefixtures("simgpu"), pytest.mark.limit(180)]

NUM_BLOCKS, WIDTH = 5, 64
BLOCK = 4 * (WIDTH * WIDTH + WIDTH) + 4 * 2 * WIDTH + 8  # bytes: a weight, a bias and three buffers


@pytest.fixture
def in_rank(run_ranks) -> Callable[..., Any]:
    """Run a function in a process that has the device."""

    def run(function: Callable[..., Any], *args: Any, **env: str) -> Any:
        return run_ranks(function, *args, world_size=1, deadline=150, env={"OMP_NUM_THREADS": "1", **env})[0]

    return run


def _model() -> Any:
    from collections import OrderedDict

    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = []
    for _ in range(NUM_BLOCKS):
        norm = nn.BatchNorm1d(WIDTH, affine=False)
        norm.running_mean = torch.randn(WIDTH)
        blocks.append(nn.Sequential(OrderedDict(linear=nn.Linear(WIDTH, WIDTH), tanh=nn.Tanh(), norm=norm)))
    return nn.Sequential(*blocks).requires_grad_(False).eval()


def _stage(model: Any, *, files: Any = None) -> Any:
    """Give each block a placement and hooks. Returns the schedule."""
    import torch

    from nb_accelerate.training.bigmodel.placement import Staged
    from nb_accelerate.training.bigmodel.schedule import Schedule

    device = torch.device("simgpu:0")
    schedule = Schedule(device)
    schedule.events = []
    for number, block in model.named_children():
        names = [f"{number}.{name}" for name in block.state_dict()]
        tensors = [
            (
                model.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
                tensor if files is None else files[name],
            )
            for name, tensor in zip(names, block.state_dict().values(), strict=True)
        ]
        placement = Staged(tensors, device, files=files, names=names)
        schedule.add(placement)
        block.register_forward_pre_hook(lambda _, args, placement=placement: (schedule.before(placement), args)[1])
        block.register_forward_hook(lambda *_, placement=placement: schedule.after(placement), always_call=True)
    return schedule


def test_outputs_are_those_of_a_model_on_the_device_and_at_most_two_blocks_are_there(in_rank, tmp_path) -> None:
    def run(folder: str) -> list[float]:
        from pathlib import Path

        import torch
        from safetensors.torch import save_file

        from nb_accelerate.training.bigmodel.mapped import WeightFiles

        inputs = torch.randn(3, WIDTH, device="simgpu")
        resident = _model().to("simgpu")
        expected = [resident(inputs), resident(inputs * 2)]
        save_file(_model().state_dict(), f"{folder}/model.safetensors")
        del resident
        peaks = []
        for files in (None, WeightFiles([Path(folder, "model.safetensors")])):
            model = _model()
            parameters = [*model.parameters()]
            schedule = _stage(model, files=files)
            torch.simgpu.reset_peak_memory_stats()
            before = torch.simgpu.memory_allocated()
            for guard in (torch.no_grad, torch.inference_mode, torch.enable_grad):
                with guard():
                    assert torch.equal(model(inputs), expected[0])
                    assert torch.equal(model(inputs * 2), expected[1])
            peaks.append((torch.simgpu.max_memory_allocated() - before) / BLOCK)
            assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
            assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
            if files is not None:
                assert all(files[name].data_ptr() == at.data_ptr() for name, at in model.state_dict().items())
            schedule.close()
            assert torch.simgpu.memory_allocated() == before
        return peaks

    for peak in in_rank(run, str(tmp_path)):
        assert 2 <= peak < 2.4  # two blocks, what rounds their tensors up, and outputs


def test_the_next_block_is_fetched_before_this_one_computes(in_rank) -> None:
    def run() -> list[tuple[str, str]]:
        import torch

        model = _model()
        schedule = _stage(model)
        for block in model:
            block.linear.register_forward_pre_hook(lambda *_: schedule.events.append(("compute", "")))
        for _ in range(2):
            schedule.events.clear()
            model(torch.ones(1, WIDTH, device="simgpu"))
        schedule.close()
        return schedule.events

    events = in_rank(run)
    numbers = [str(number) for number in range(NUM_BLOCKS)]
    expected = [
        event
        for number, following in zip(numbers, [*numbers[1:], None], strict=True)
        for event in [("arrive", number), ("fetch", following), ("compute", ""), ("leave", number)]
        if event[1] is not None
    ]
    assert events == expected


class Logged:
    """The module of a device, or a stream or event of it, with a log of who waits for what."""

    def __init__(self, real: Any, log: list[str], name: str = "") -> None:
        self.real, self.log, self.name = real, log, name

    def Event(self) -> Logged:
        return Logged(self.real.Event(), self.log)

    def Stream(self, device: Any) -> Logged:
        return Logged(self.real.Stream(device), self.log, "copy")

    def current_stream(self, device: Any) -> Logged:
        return Logged(self.real.current_stream(device), self.log, "block")

    def stream(self, stream: Logged) -> Any:
        return self.real.stream(stream.real)

    def record(self, stream: Logged) -> None:
        self.name = f"{stream.name} {sum(line.startswith(f'end of {stream.name}') for line in self.log)}"
        self.log.append(f"end of {self.name}")
        self.real.record(stream.real)

    def wait_event(self, event: Logged) -> None:
        self.log.append(f"{self.name} waits for {event.name}")
        self.real.wait_event(event.real)

    def synchronize(self) -> None:
        self.log.append(f"buffer waits for {self.name}")
        self.real.synchronize()


def test_no_memory_is_written_to_again_before_its_event(in_rank) -> None:
    def run() -> list[str]:
        import torch

        log: list[str] = []
        model = _model()
        schedule = _stage(model)
        schedule.staging._module = Logged(torch.simgpu, log)
        model(torch.ones(1, WIDTH, device="simgpu"))
        schedule.close()
        return log

    log = in_rank(run)
    for number in range(NUM_BLOCKS):
        assert log.index(f"end of copy {number}") < log.index(f"block waits for copy {number}")
        assert log.index(f"end of block {number}") < log.index(f"copy waits for block {number}")
        if number > 1:
            assert log.index(f"buffer waits for copy {number - 2}") < log.index(f"end of copy {number}")
            assert log.index(f"copy waits for block {number - 2}") < log.index(f"block waits for copy {number}")


def test_changes_of_weights_at_rest_are_seen(in_rank) -> None:
    def run() -> None:
        import torch
        from torch import nn

        model, inputs = _model(), torch.ones(1, WIDTH, device="simgpu")
        schedule = _stage(model)
        plain = _model().to("simgpu")

        def double(weight: Any) -> None:
            weight.mul_(2)

        def replace_numbers(weight: Any) -> None:
            weight.data = weight.data * 2

        def behind_the_back(weight: Any) -> None:
            weight.data.mul_(2)

        for change in (double, replace_numbers, behind_the_back):
            model(inputs)  # the last blocks may be called soon, and the first one is fetched by nobody
            for each in (model, plain):
                change(each[0].linear.weight)
            assert torch.equal(model(inputs), plain(inputs)), change
        model[0](inputs)  # the second block is fetched, and is not called
        for change in (double, replace_numbers):
            for each in (model, plain):
                change(each[1].linear.weight)
            assert torch.equal(model[1](inputs), plain[1](inputs)), change
            model[0](inputs)
        for each in (model, plain):
            each[1].linear = nn.Linear(WIDTH, WIDTH, device=each[1].linear.weight.device)
        model[1].linear.to("simgpu").load_state_dict(plain[1].linear.state_dict())  # it has no place of the block
        assert torch.equal(model(inputs), plain(inputs))
        schedule.close()

    in_rank(run)


def test_blocks_that_are_called_in_another_order_twice_never_or_fail(in_rank) -> None:
    def run() -> None:
        import torch

        model, inputs = _model(), torch.ones(1, WIDTH, device="simgpu")
        schedule = _stage(model)
        plain = _model().to("simgpu")
        for order in ((0, 1, 2, 3, 4), (4, 0, 0, 2), (1, 1, 3), (0, 1, 2, 3, 4)):
            found, expected = inputs, inputs
            for number in order:
                found, expected = model[number](found), plain[number](expected)
            assert torch.equal(found, expected)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model[1](torch.ones(1, 3, device="simgpu"))
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        assert torch.equal(model(inputs), plain(inputs))
        schedule.close()

    in_rank(run)


def test_threads_share_blocks_and_tied_weights(in_rank) -> None:
    def run() -> None:
        import threading

        import torch

        model, plain = _model(), _model().to("simgpu")
        for each in (model, plain):
            each[4].linear.weight = each[0].linear.weight
        schedule = _stage(model)
        errors: list[BaseException] = []

        def compute(seed: int) -> None:
            inputs = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)).to("simgpu")
            expected = plain(inputs)
            try:
                for _ in range(10):
                    assert torch.equal(model(inputs), expected)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=compute, args=[seed]) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        assert model[4].linear.weight is model[0].linear.weight
        assert not schedule.staging.swaps
        inner = model[4]  # is now inside of another block, with the same weight
        model[0].linear.register_forward_hook(lambda _, args, output: output + inner(args[0]))
        plain[0].linear.register_forward_hook(lambda _, args, output: output + plain[4](args[0]))
        inputs = torch.ones(1, WIDTH, device="simgpu")
        assert torch.equal(model[0](inputs), plain[0](inputs))
        assert model[0].linear.weight.device.type == "cpu"
        schedule.close()

    in_rank(run)


def test_a_device_with_room_for_one_block_has_the_next_one_when_that_has_left(in_rank) -> None:
    def run() -> None:
        import torch

        model, plain = _model(), _model()
        schedule = _stage(model)
        found = model(torch.ones(1, WIDTH, device="simgpu")).cpu()
        schedule.close()
        assert torch.allclose(found, plain(torch.ones(1, WIDTH)), atol=1e-6)

    in_rank(run, SIMGPU_MEMORY=str(int(1.6 * BLOCK)))


@pytest.mark.parametrize("lacks", ["streams", "pinned memory"])
def test_a_device_without_streams_or_pinned_memory_copies_all_the_same(in_rank, lacks) -> None:
    def run(lacks: str) -> None:
        import torch

        empty = torch.empty

        def refuse(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            if pin_memory:
                raise RuntimeError("no more memory can be locked")
            return empty(*args, **options)

        if lacks == "streams":
            del torch.simgpu.Stream
        else:
            torch.empty = refuse
        model, plain, inputs = _model(), _model().to("simgpu"), torch.ones(1, WIDTH, device="simgpu")
        schedule = _stage(model)
        assert torch.equal(model(inputs), plain(inputs))
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        schedule.close()

    in_rank(run, lacks)


def test_an_interrupt_while_a_block_arrives_leaves_its_weights_at_rest(in_rank) -> None:
    def run() -> None:
        import signal

        import torch

        model, inputs = _model(), torch.ones(1, WIDTH, device="simgpu")
        schedule = _stage(model)
        wait_for = schedule.staging.wait_for
        schedule.staging.wait_for = lambda _: signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            model(inputs)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        schedule.staging.wait_for = wait_for
        assert torch.equal(model(inputs), _model().to("simgpu")(inputs))
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}
        schedule.close()

    in_rank(run)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_has_weights_and_a_schedule_of_its_own(in_rank, how) -> None:
    def run(how: str) -> None:
        import copy
        import pickle

        import torch

        model, inputs = _model(), torch.ones(1, WIDTH, device="simgpu")
        schedule = _stage(model)
        placements = [*schedule._added]
        expected = model(inputs)  # there is a thread, and a buffer
        whole = [schedule, placements, model.state_dict(keep_vars=True)]
        copied, copies, _ = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
        for placement, original in zip(copies, placements, strict=True):
            copied.before(placement)
            assert {owner.weight.device.type for owner, name in placement.slots if name == "weight"} == {"simgpu"}
            assert {owner.weight.device.type for owner, name in original.slots if name == "weight"} == {"cpu"}
            copied.after(placement)
        assert torch.equal(model(inputs), expected)
        copied.close()
        schedule.close()

    in_rank(run, how)
