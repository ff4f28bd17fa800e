"""Where this package differs from accelerate on purpose: one test for each line of ``nb_accelerate/compat/parity.md``.

Each test shows both: what accelerate does, and what happens here. A test that fails because the two agree now wants its
line in ``tests/structure/parity.py`` to be removed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import nb_accelerate
import nb_accelerate.utils
from nb_accelerate.errors import CheckpointError, ConfigError, MissingDependencyError, NotPreparedError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.training.checkpoint import quantised
from nb_accelerate.training.state import AcceleratorState, GradientState, PartialState

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _both_forget():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def both(*args: Any, **kwargs: Any) -> list[Any]:
    return [accelerate.Accelerator(*args, **kwargs), nb_accelerate.Accelerator(*args, **kwargs)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(22))


class Buckets(BatchSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch


def _padded(rows):
    return nn.utils.rnn.pad_sequence([torch.full((row + 1,), row) for row in rows], batch_first=True)


def _on_two_ranks() -> dict[str, Any]:
    """What each package does on this rank, by name: first what accelerate says."""
    found: dict[str, Any] = {}

    def note(name: str, function: Any) -> None:
        try:
            found.setdefault(name, []).append(function())
        except Exception as error:
            found.setdefault(name, []).append(type(error).__name__)

    ours = nb_accelerate.Accelerator(cpu=True)  # makes the process group, which accelerate takes as it finds it
    found["accelerate knows"] = accelerate.PartialState._shared_state == {}
    accelerate.PartialState(cpu=True)
    mean = accelerate.utils.reduce(torch.tensor([1.0 + ours.process_index]))
    found["accelerate knows then"] = accelerate.PartialState().num_processes, mean.item()
    for accelerator in (accelerate.Accelerator(cpu=True), ours):
        given = torch.tensor([1.0 + accelerator.process_index])
        for reduction in ("none", "sum"):
            note(reduction, lambda a=accelerator, r=reduction, g=given: a.reduce(g, r).item())
        note("scale", lambda a=accelerator, g=given: a.reduce(g, "sum", scale=2.0).item())
        note("backward", lambda a=accelerator: a.backward(torch.ones((), requires_grad=True)))
        state, loader = accelerator.gradient_state, accelerator.prepare(DataLoader(range(22), batch_size=4))
        note("remainder", lambda s=state, one=loader: [s.remainder for _ in one])
        note("stream", lambda a=accelerator: a.prepare(DataLoader(Stream(), batch_size=4)).total_batch_size)
        buckets = Buckets(range(8), 2, False)
        accelerator.prepare(DataLoader(range(8), batch_sampler=buckets)).set_epoch(3)
        note("epoch", lambda one=buckets: one.epoch)
        package = importlib.import_module(type(accelerator).__module__.partition(".")[0])
        padded = package.data_loader.prepare_data_loader(
            DataLoader(range(4), batch_size=4, collate_fn=_padded),
            device=torch.device("cpu"),
            split_batches=True,
            put_on_device=True,
            dispatch_batches=True,
        )
        note("widths", lambda one=padded: [batch.shape[1] for batch in one])
        dropping = package.data_loader.prepare_data_loader(
            DataLoader(range(25), batch_sampler=BatchSampler(range(25), 5, drop_last=True)),
            device=torch.device("cpu"),
            put_on_device=True,
            dispatch_batches=True,
        )
        note("dropped", lambda one=dropping: torch.cat(list(one)).tolist())
        torch.manual_seed(0)
        shuffled = accelerator.prepare(DataLoader(range(8), batch_size=2, shuffle=True))
        note("order", lambda a=accelerator, one=shuffled: a.gather(torch.cat(list(one))).tolist())
    torch.manual_seed(0)
    found["order of one process"] = torch.cat(list(DataLoader(range(8), batch_size=2, shuffle=True))).tolist()
    return found


@pytest.fixture(scope="module")
def on_two_ranks():
    return notebook_launcher(_on_two_ranks, num_processes=2, progress="off", timeout=45.0)


def test_a_second_accelerator_may_be_told_another_precision():
    both(cpu=True, mixed_precision="bf16")
    theirs, ours = both(cpu=True)
    assert (theirs.mixed_precision, ours.mixed_precision) == ("bf16", "bf16")
    with pytest.raises(ValueError, match="already been initialized"):
        accelerate.Accelerator(cpu=True, mixed_precision="no")
    assert nb_accelerate.Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


def test_a_tracker_whose_library_is_missing_is_an_error():
    missing = next(
        name for name in ("clearml", "aim", "dvclive") if not getattr(accelerate.utils, f"is_{name}_available")()
    )
    with pytest.warns(UserWarning, match="no supported trackers"):
        assert accelerate.Accelerator(cpu=True, log_with=missing, project_dir=".").log_with == []
    with pytest.raises(MissingDependencyError, match=missing):
        nb_accelerate.Accelerator(cpu=True, log_with=missing, project_dir=".")


def test_prepare_refuses_what_it_does_not_know():
    theirs, ours = both(cpu=True)
    assert theirs.prepare("a metric") == "a metric"
    with pytest.raises(ConfigError, match="given a str"):
        ours.prepare("a metric")


def test_options_refuse_what_would_do_nothing():
    for package, refuses in ((accelerate, False), (nb_accelerate, True)):
        config = package.utils.DataLoaderConfiguration()
        loader = package.Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(4)))
        if refuses:
            with pytest.raises(AttributeError, match="Did you mean 'data_seed'"):
                config.data_sede = 3
            with pytest.raises(ConfigError, match="data_seed='3' is of type"):
                config.data_seed = "3"
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                config.data_sede = 3
                config.data_seed = "3"
        assert len(loader) == 4


def test_an_accelerator_cannot_be_pickled_or_copied():
    theirs, ours = both(cpu=True)
    assert pickle.loads(pickle.dumps(theirs)).num_processes == copy.deepcopy(theirs).num_processes == 1
    for send in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="knows only the process"):
            send(ours)


def test_states_are_views_and_cannot_be_set():
    theirs, ours = both(cpu=True)
    theirs.state.distributed_type = accelerate.DistributedType.MULTI_GPU
    assert theirs.distributed_type is accelerate.DistributedType.MULTI_GPU
    with pytest.raises(AttributeError):
        ours.state.distributed_type = nb_accelerate.DistributedType.MULTI_GPU
    kept = pickle.dumps(theirs.state), pickle.dumps(ours.state)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    both(cpu=True, mixed_precision="bf16")
    assert [pickle.loads(state).mixed_precision for state in kept] == ["no", "bf16"]


def test_reduce_none_gives_back_what_it_was_given(on_two_ranks):
    assert [found["none"] for found in on_two_ranks] == [[3.0, 1.0], [3.0, 2.0]]
    assert [found["sum"] for found in on_two_ranks] == [[3.0, 3.0], [3.0, 3.0]]


def test_reduce_multiplies_with_scale(on_two_ranks):
    assert [found["scale"] for found in on_two_ranks] == [[3.0, 6.0], [3.0, 6.0]]
    assert [one.reduce(torch.ones(1), "sum", scale=2.0).item() for one in both(cpu=True)] == [1.0, 2.0]


def test_a_model_with_numbers_keeps_them_in_a_folder_of_another(tmp_path):
    found = []
    for package in (accelerate, nb_accelerate):
        old, new = nn.Linear(2, 2), nn.Linear(2, 2)
        want, inputs = [model.weight.sum(1).tolist() for model in (old, new)], torch.ones(1, 2)
        for model in (old, new):
            model.bias.data.zero_()
            package.disk_offload(model, tmp_path / package.__name__, torch.device("cpu"))
        found.append([row == pytest.approx(new(inputs)[0].tolist()) for row in want])
    assert found == [[True, False], [False, True]]


def test_maps_of_devices_keep_room_for_visitors_only():
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    theirs, ours = (
        dict(package.infer_auto_device_map(model, {0: 800, 1: 800, "cpu": 800}))
        for package in (accelerate, nb_accelerate)
    )
    assert theirs == {"0": 0, "1": 1, "2": 1, "3": "cpu"}
    assert ours == {"0": 0, "1": 0, "2": 1, "3": 1}


def test_maps_of_devices_with_a_fallback_fill_each_device():
    model = nn.Sequential(*(nn.Linear(size, 10, bias=False) for size in (10, 40, 10, 20)))
    theirs, ours = (
        dict(package.infer_auto_device_map(model, {0: 2400, "cpu": 8000}, fallback_allocation=True))
        for package in (accelerate, nb_accelerate)
    )
    assert theirs == {"0": 0, "1": "cpu", "2": "cpu", "3": "cpu"}
    assert ours == {"0": 0, "1": "cpu", "2": 0, "3": "cpu"}


def test_a_part_of_offloaded_weights_has_names_of_its_own():
    whole = {"a.weight": torch.zeros(1), "b.weight": torch.ones(1)}
    theirs, ours = (package.utils.PrefixedDataset(whole, "a.") for package in (accelerate, nb_accelerate))
    assert (list(theirs), len(theirs)) == (["a.weight"], 2)
    assert (list(ours), len(ours)) == (["weight"], 1)
    assert dict(ours) == {"weight": whole["a.weight"]}
    with pytest.raises(KeyError):
        dict(theirs)


def test_quantised_weights_are_on_the_device_that_computes():
    device_map = {"0": 0, "1": "cpu", "2": "disk"}
    model, config = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), {"load_in_8bit": True, "skip_modules": []}
    theirs, ours = (
        package.utils.BnbQuantizationConfig(**config, keep_in_fp32_modules=[])
        for package in (accelerate, nb_accelerate)
    )
    made_map = importlib.import_module("accelerate.utils.bnb").get_quantized_model_device_map
    assert made_map(model, theirs, device_map) == device_map
    with pytest.raises(RuntimeError, match="GPU is needed"):
        made_map(model, theirs, None)
    assert quantised.map_for(model, ours, None) == ({"": torch.device("cpu")}, [])
    assert quantised.map_for(model, ours, device_map) == (device_map, ["1", "2"])


@pytest.mark.may_leave("threads")  # of tqdm
def test_loading_leaves_no_weight_without_numbers(tmp_path):
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain[1].running_mean.fill_(5)
    weights = plain.state_dict()
    save_file(weights, tmp_path / "whole.safetensors")
    del weights["0.bias"]
    save_file(weights, tmp_path / "partial.safetensors")

    def load(package, name, **options):
        with package.init_empty_weights():
            model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        package.load_checkpoint_in_model(model, str(tmp_path / name), {"0": "cpu", "1": "disk"}, **options)
        return model

    assert load(accelerate, "partial.safetensors", offload_folder=tmp_path / "off")[0].bias.is_meta
    with pytest.raises(CheckpointError, match=r"has no 0\.bias"):
        load(nb_accelerate, "partial.safetensors")
    with pytest.raises(ValueError, match="offload_folder"):
        load(accelerate, "whole.safetensors")
    theirs = load(accelerate, "whole.safetensors", offload_folder=tmp_path / "off")
    assert theirs[1].running_mean.tolist() == [0, 0]
    assert load(nb_accelerate, "whole.safetensors")[1].running_mean.tolist() == [5, 5]


def test_an_accelerator_outlives_the_reset_of_states():
    theirs, ours = both(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not PartialState._shared_state
    with pytest.raises(AttributeError, match="_reset_state"):
        theirs.device  # noqa: B018
    assert ours.device.type == "cpu"


def test_the_remainder_is_known_at_the_last_batch(on_two_ranks):
    for found in on_two_ranks:
        assert found["remainder"] == [[6, 6, 6], [-1, -1, 6]]


def test_a_prepared_stream_has_a_total_batch_size(on_two_ranks):
    assert [found["stream"] for found in on_two_ranks] == [["AttributeError", 8]] * 2


def test_unseeded_shuffles_have_the_order_of_one_process(on_two_ranks):
    for found in on_two_ranks:
        theirs, ours = (sorted(rows[:2]) + sorted(rows[4:6]) for rows in found["order"])
        alone = found["order of one process"]
        assert sorted(found["order"][1]) == sorted(found["order"][0]) == list(range(8))
        assert ours == sorted(alone[:2]) + sorted(alone[2:4])
        assert theirs != ours


def test_an_epoch_of_a_skipping_loader_is_one_of_the_loader_it_was_made_of():
    orders = []
    for package in (accelerate, nb_accelerate):
        config = package.utils.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
        accelerator = package.Accelerator(cpu=True, dataloader_config=config)
        loader = accelerator.prepare(DataLoader(range(6), shuffle=True))
        resumed = [int(row) for row in accelerator.skip_first_batches(loader, 2)]
        orders.append((resumed, [int(row) for row in loader], [int(row) for row in loader]))
    (their_rest, their_next, their_second), (our_rest, our_next, _) = orders
    assert our_rest == their_rest == their_next[2:]  # the epoch that was resumed comes once more
    assert our_next == their_second


def test_one_process_is_of_distributed_type_no_however_it_was_started(run_ranks):
    def types():
        return [one.distributed_type.value for one in both(cpu=True)[::-1]]

    assert run_ranks(types, world_size=1) == [["NO", "MULTI_CPU"]]


def test_a_plugin_without_a_number_takes_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    steps = []
    for package in (accelerate, nb_accelerate):
        plugin = package.utils.GradientAccumulationPlugin(sync_each_batch=True)
        steps.append(package.Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps)
    assert steps == [1, 4]


def test_batch_samplers_are_told_the_epoch(on_two_ranks):
    assert on_two_ranks[0]["epoch"] == [0, 3]


def test_split_batches_are_made_for_each_rank(on_two_ranks):
    assert on_two_ranks[0]["widths"] == [[4], [2]]
    assert on_two_ranks[1]["widths"] == [[4], [4]]


def test_a_batch_sampler_that_drops_does_so_where_one_rank_reads(on_two_ranks):
    theirs, ours = zip(*(rank["dropped"] for rank in on_two_ranks), strict=True)
    assert sorted(theirs[0] + theirs[1]) == [0, *range(25)]
    assert sorted(ours[0] + ours[1]) == [*range(20)]


def test_tensors_in_dataclasses_become_float32():
    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor

    made = [
        package.utils.convert_outputs_to_fp32(lambda: Output(torch.ones(1, dtype=torch.bfloat16)))()
        for package in (accelerate, nb_accelerate)
    ]
    assert [output.loss.dtype for output in made] == [torch.bfloat16, torch.float32]


def test_schedulers_are_adjusted_unless_it_is_switched_off():
    both(cpu=True)
    assert accelerate.utils.GradientAccumulationPlugin().adjust_scheduler
    assert [accelerate.state.GradientState().adjust_scheduler, GradientState().adjust_scheduler] == [False, True]


def test_handlers_that_were_not_given_have_their_defaults():
    theirs, ours = both(cpu=True)
    names = ("ddp_handler", "scaler_handler", "init_handler", "autocast_handler", "profile_handler")
    assert [getattr(theirs, name) for name in names] == [None] * 5
    assert all(getattr(ours, name).to_kwargs() == {} for name in names)
    process_group = accelerate.utils.InitProcessGroupKwargs()
    assert (process_group.backend, process_group.timeout.seconds) == ("nccl", 600)
    process_group = nb_accelerate.utils.InitProcessGroupKwargs()
    assert (process_group.backend, process_group.timeout) == (None, None)


def test_words_are_printed_as_their_values():
    assert str(accelerate.DistributedType.MULTI_CPU) == "DistributedType.MULTI_CPU"
    assert str(nb_accelerate.DistributedType.MULTI_CPU) == "MULTI_CPU"
    assert nb_accelerate.DistributedType.MULTI_CPU == accelerate.DistributedType.MULTI_CPU


def test_later_arguments_are_given_by_name():
    assert accelerate.Accelerator(True, False, "no", 1, True, None, None, None, None, None, ["torch"]).rng_types
    with pytest.raises(TypeError, match="positional arguments"):
        nb_accelerate.Accelerator(True, False, "no", 1, True, None, None)  # type: ignore[misc]
    for kind in ("DataLoaderShard", "DataLoaderDispatcher"):
        importlib.import_module("accelerate.data_loader").__dict__[kind](range(3), None)
        with pytest.raises(TypeError, match="positional arguments"):
            importlib.import_module("nb_accelerate.data_loader").__dict__[kind](range(3), None)


def test_errors_have_other_texts_and_mostly_the_same_builtin_types():
    texts = []
    for package in (accelerate, nb_accelerate):
        with pytest.raises(ValueError, match="bf61") as caught:
            package.Accelerator(cpu=True, mixed_precision="bf61")
        texts.append((str(caught.value), repr(package.PartialState(cpu=True))))
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_fp16_computes_in_float16_on_a_cpu_too():
    theirs, ours = both(cpu=True, mixed_precision="fp16")
    for accelerator, dtype in ((theirs, torch.float32), (ours, torch.float16)):
        with accelerator.autocast():
            assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype is dtype
    assert theirs.scaler is None
    assert ours.scaler is not None


def test_backward_on_several_processes_needs_a_prepared_model(on_two_ranks):
    assert [found["backward"] for found in on_two_ranks] == [[None, NotPreparedError.__name__]] * 2


@pytest.mark.slow
def test_ranks_that_share_rows_count_as_one(run_ranks):
    def gathered() -> tuple[int, bool]:
        layout = nb_accelerate.ParallelismConfig(tp_size=2)
        ours = nb_accelerate.Accelerator(cpu=True, parallelism_config=layout)
        try:
            accelerate.Accelerator(cpu=True, parallelism_config=accelerate.ParallelismConfig(tp_size=2))
        except ValueError as error:
            return len(ours.gather(torch.ones(3))), "MULTI_CPU" in str(error)
        return 0, False

    assert run_ranks(gathered) == [(3, True)] * 2


def test_attributes_of_an_accelerator_that_count_for_nothing_later_cannot_be_set():
    theirs, ours = both(cpu=True)
    for name in ("scaler", "init_handler", "scaler_handler", "state"):
        setattr(theirs, name, None)
        with pytest.raises(AttributeError):
            setattr(ours, name, None)


def test_libraries_that_ask_accelerate_itself_see_one_process_until_it_is_told(on_two_ranks):
    for found in on_two_ranks:
        assert found["accelerate knows"] is True
        assert found["accelerate knows then"] == (2, 1.5)


@pytest.mark.slow
def test_losses_of_boxes_in_transformers_are_those_of_one_process(run_ranks):
    pytest.importorskip("transformers.loss")

    def box_losses():
        rank = nb_accelerate.Accelerator(cpu=True).process_index
        from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss

        loss = ImageLoss(HungarianMatcher(), num_classes=2, eos_coef=0.1, losses=["boxes"])
        images = torch.arange(2) + 2 * rank  # each has one box, which is off by a hundredth of its number in each side
        found = {"logits": torch.zeros(2, 1, 3), "pred_boxes": (0.5 + images / 100).reshape(2, 1, 1).expand(2, 1, 4)}
        true = [{"class_labels": torch.tensor([1]), "boxes": torch.full((1, 4), 0.5)} for _ in images]
        untold = loss(found, true)["loss_bbox"]
        accelerate.PartialState(cpu=True)
        return untold.item(), loss(found, true)["loss_bbox"].item()

    ours, told = (sum(ranks) / 2 for ranks in zip(*run_ranks(box_losses), strict=True))
    of_one_process = sum(4 * number / 100 for number in range(4)) / 4
    assert ours == pytest.approx(of_one_process)
    assert told == pytest.approx(2 * of_one_process)  # transformers divides by the number of processes twice
