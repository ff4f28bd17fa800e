"""The free functions of ``nb_accelerate.utils`` and its kin: structures, exchange, loaders, models, files."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from nb_accelerate import Accelerator, debug_launcher, utils
from nb_accelerate.data_loader import SkipDataLoader, get_sampler, prepare_data_loader
from nb_accelerate.errors import ConfigError
from nb_accelerate.optimizer import move_to_device

Point = namedtuple("Point", "x y")


# --- structures -----------------------------------------------------------------------------------------------------


def test_a_function_is_applied_to_the_leaves_that_are_meant():
    data = {"a": [1, "b"], "c": Point(2, (3.5,))}
    doubled = utils.recursively_apply(lambda n, by: n * by, data, 2, test_type=lambda leaf: isinstance(leaf, int))
    assert doubled == {"a": [2, "b"], "c": Point(4, (3.5,))}
    assert type(doubled["c"]) is Point
    with pytest.raises(TypeError, match="found a str"):
        utils.recursively_apply(
            lambda n: n, data, test_type=lambda leaf: isinstance(leaf, (int, float)), error_on_other_type=True
        )
    moved = utils.recursively_apply(torch.neg, OrderedDict(t=torch.ones(1), s="x"))
    assert (type(moved), moved["t"].item(), moved["s"]) == (OrderedDict, -1.0, "x")


@pytest.mark.parametrize(("rows", "added"), [(1, 2), (3, 0), (4, 2), (8, 1), (10, 2)])
def test_rows_of_zeros_make_a_batch_one_that_can_be_shared_out(rows: int, added: int):
    x = torch.ones(rows, 2)
    padded = utils.pad_input_tensors({"x": [x]}, rows, 3)["x"][0]
    assert torch.equal(padded, torch.cat([x, torch.zeros(added, 2)]))
    assert torch.equal(utils.pad_input_tensors(x.T, rows, 3, dim=1), padded.T)


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.integers(), lambda leaves: st.lists(leaves) | st.dictionaries(st.text(), leaves)))
def test_a_function_that_changes_nothing_changes_nothing(data: Any):
    assert utils.recursively_apply(lambda leaf: leaf, data, test_type=lambda leaf: isinstance(leaf, int)) == data


def test_structures_are_described_and_made_again():
    data = {"a": torch.zeros(2, 3), "b": [torch.ones(4, dtype=torch.int64)]}
    forms = utils.get_data_structure(data)
    assert forms["b"][0] == utils.TensorInformation(torch.Size([4]), torch.int64)
    made = utils.initialize_tensors(forms)
    assert (made["a"].shape, made["b"][0].dtype) == ((2, 3), torch.int64)
    assert (utils.find_batch_size(data), utils.find_device(data), utils.find_device([])) == (
        2,
        torch.device("cpu"),
        None,
    )
    assert utils.ignorant_find_batch_size([1, "a"]) is None
    with pytest.raises(TypeError, match="tensor that has rows"):
        utils.find_batch_size([torch.tensor(1.0)])
    assert utils.honor_type(Point(1, 2), iter([3, 4])) == Point(3, 4)
    assert utils.is_namedtuple(Point(1, 2))
    assert not utils.is_namedtuple((1, 2))


def test_structures_are_joined_cut_and_listed():
    first, second = {"a": (torch.zeros(2),), "b": torch.zeros(1, 2)}, {"a": (torch.ones(1),), "b": torch.ones(1, 2)}
    joined = utils.concatenate([first, second])
    assert utils.listify(joined) == {"a": ([0.0, 0.0, 1.0],), "b": [[0.0, 0.0], [1.0, 1.0]]}
    assert utils.concatenate([first["b"], second["b"]], dim=1).shape == (1, 4)
    assert utils.listify(utils.slice_tensors(joined, slice(1, 2))) == {"a": ([0.0],), "b": [[1.0, 1.0]]}
    assert utils.listify(torch.tensor([0.5], dtype=torch.bfloat16)) == [0.5]
    assert utils.concatenate([{"text": "alone"}]) == {"text": "alone"}
    with pytest.raises(TypeError, match="found a str"):
        utils.concatenate(["a", "b"])


def test_placement_leaves_out_the_keys_it_is_told():
    batch = {"x": torch.ones(1), "label": torch.ones(1)}
    moved = utils.send_to_device(batch, "meta", skip_keys="label")
    assert (moved["x"].device.type, moved["label"].device.type) == ("meta", "cpu")
    assert utils.send_to_device(batch, "meta", False, ["x", "label"])["x"].device.type == "cpu"
    assert move_to_device({"step": batch}, "meta")["step"]["x"].device.type == "meta"


# --- exchange -------------------------------------------------------------------------------------------------------


def test_free_functions_exchange_what_an_accelerator_would(run_ranks):
    def run():
        import torch

        from nb_accelerate import PartialState, utils

        rank = PartialState(cpu=True).process_index  # no Accelerator
        mine = torch.full((rank + 1,), float(rank))
        padded = utils.pad_across_processes(mine, pad_index=-1)
        utils.wait_for_everyone()
        return (
            utils.gather(padded).tolist(),
            utils.reduce(torch.tensor([float(rank)])).item(),
            utils.reduce(torch.tensor([float(rank)]), "sum", 10.0).item(),
            utils.broadcast({"a": torch.tensor([rank])}, from_process=1)["a"].item(),
            utils.gather_object([rank, "x"]),
            utils.broadcast_object_list([rank], from_process=1),
        )

    assert run_ranks(run) == [([0.0, -1.0, 1.0, 1.0], 0.5, 10.0, 1, [0, "x", 1, "x"], [1])] * 2


def test_broadcast_also_writes_to_what_it_was_given(run_ranks):
    def run():
        import torch

        from nb_accelerate import PartialState, utils

        rank = PartialState(cpu=True).process_index
        plain, leaf = torch.full((3,), float(rank)), torch.full((2,), float(rank), requires_grad=True)
        expanded = torch.full((1,), float(rank)).expand(2)
        utils.broadcast([plain, leaf], from_process=1)
        powers = leaf.exp()  # whose backward needs its values
        utils.broadcast(powers, from_process=1)
        powers.sum().backward()
        received = utils.broadcast(expanded, from_process=1)
        return plain.tolist(), leaf.tolist(), leaf.grad.isfinite().all().item(), received.tolist()

    assert run_ranks(run) == [([1.0, 1.0, 1.0], [1.0, 1.0], True, [1.0, 1.0])] * 2


def test_one_process_exchanges_with_itself():
    assert utils.gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert utils.broadcast_object_list([3]) == [3]


def test_a_file_is_saved_by_the_main_process_only(run_ranks, tmp_path: Path):
    def run(folder):
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.save({"rank": torch.tensor(accelerator.process_index)}, f"{folder}/a.pt")
        accelerator.wait_for_everyone()

    run_ranks(run, str(tmp_path))
    assert utils.load(tmp_path / "a.pt")["rank"].item() == 0


def test_debug_launcher_returns_what_processes_return():
    def rank() -> tuple[int, int]:
        from nb_accelerate import PartialState

        state = PartialState()
        return state.process_index, state.num_processes

    assert debug_launcher(rank) == [(0, 2), (1, 2)]


# --- loaders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_a_loader_can_act_as_that_of_any_process(split: bool):
    rows = torch.arange(10)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    parts = [
        [batch[0].tolist() for batch in prepare_data_loader(loader, None, 2, rank, split_batches=split)]
        for rank in range(2)
    ]
    if split:  # each batch of 4 in two halves; the last one has 2 rows, filled up from the start
        assert parts == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]]
    else:
        assert parts == [[[0, 1, 2, 3], [8, 9, 0, 1]], [[4, 5, 6, 7], [2, 3, 4, 5]]]


def test_a_loader_cannot_act_as_a_process_there_is_not():
    with pytest.raises(ConfigError, match="none of num_processes=2"):
        prepare_data_loader(DataLoader([1]), num_processes=2, process_index=2)


def test_a_loader_that_skips_begins_later_every_time():
    loader = SkipDataLoader(TensorDataset(torch.arange(6)), skip_batches=2, batch_size=2)
    assert [[batch[0].tolist() for batch in loader] for _ in range(2)] == [[[4, 5]]] * 2


def test_the_sampler_of_a_prepared_loader_is_the_users():
    loader = DataLoader(TensorDataset(torch.arange(6)), shuffle=True)
    assert get_sampler(loader) is loader.sampler
    assert isinstance(get_sampler(prepare_data_loader(loader, num_processes=2, process_index=1)), RandomSampler)


# --- models ---------------------------------------------------------------------------------------------------------


def test_a_model_comes_out_of_what_distributes_it(run_ranks):
    def run():
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import extract_model_from_parallel

        model = torch.nn.Linear(2, 2)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(model)
        wrapped = prepared is not model
        kept = extract_model_from_parallel(prepared)
        converted = kept(torch.ones(1, 2, device=accelerator.device)).dtype, "forward" in vars(kept)
        plain = extract_model_from_parallel(prepared, keep_fp32_wrapper=False)
        return wrapped, kept is model, plain is model, converted[1], "forward" in vars(plain)

    assert run_ranks(run) == [(True, True, True, True, False)] * 2


@pytest.mark.slow  # torch imports its compiler
def test_a_compiled_model_comes_out_on_request():
    model = nn.Sequential(nn.Linear(1, 1))
    compiled = torch.compile(model)
    assert utils.is_compiled_module(compiled)
    assert utils.extract_model_from_parallel(compiled) is compiled
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert utils.has_compiled_regions(nn.Sequential(compiled))
    assert not utils.has_compiled_regions(compiled)


@pytest.mark.slow  # torch imports its compiler
@pytest.mark.parametrize(
    "unwrap", [utils.extract_model_from_parallel, lambda *a, **b: Accelerator().unwrap_model(*a, **b)]
)
def test_a_model_that_was_distributed_and_then_compiled_comes_out_compiled(unwrap: Any):
    model = nn.Linear(2, 1)
    distributed = nn.DataParallel(model)
    compiled = torch.compile(distributed, backend="eager")
    inner = unwrap(compiled)
    assert utils.is_compiled_module(inner)
    assert inner._orig_mod is model
    assert torch.equal(inner(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert compiled._orig_mod is distributed  # what was given is as before
    assert unwrap(compiled, keep_torch_compile=False) is model


def test_a_conversion_of_outputs_can_be_undone():
    model = nn.Linear(2, 1)
    model.forward = utils.convert_outputs_to_fp32(model.bfloat16().forward)
    again = pickle.loads(pickle.dumps(model))
    assert again(torch.ones(1, 2).bfloat16()).dtype is torch.float32
    assert utils.extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert "forward" not in vars(model)
    assert model(torch.ones(1, 2).bfloat16()).dtype is torch.bfloat16


def test_a_class_may_convert_its_outputs():
    class Half(nn.Module):
        @utils.convert_outputs_to_fp32
        def forward(self, x):
            return x.bfloat16()

    assert Half()(torch.ones(1)).dtype is torch.float32
    assert utils.extract_model_from_parallel(Half(), keep_fp32_wrapper=False)(torch.ones(1)).dtype is torch.float32


def test_outputs_are_converted():
    forward = utils.convert_outputs_to_fp32(lambda x: {"y": x.bfloat16(), "n": 1})
    assert forward(torch.ones(1))["y"].dtype is torch.float32
    assert utils.convert_to_fp32([torch.ones(1).half()])[0].dtype is torch.float32


def test_the_precision_of_the_newest_accelerator_is_the_one_of_the_block():
    numbers = torch.ones(2, 2, device=Accelerator(cpu=True, mixed_precision="bf16").device)
    for native, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with utils.get_mixed_precision_context_manager(native):
            assert (numbers @ numbers).dtype is dtype


def test_tensors_of_a_module_are_named():
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    everything = dict(utils.named_module_tensors(module, recurse=True))
    assert set(everything) - set(module.state_dict()) == {"0.scratch"}
    saved = dict(utils.named_module_tensors(module, recurse=True, remove_non_persistent=True))
    assert set(saved) == set(module.state_dict())
    assert dict(utils.named_module_tensors(module)) == {}
    assert utils.recursive_getattr(module, "0.weight") is module[0].weight
    assert [utils.get_pretty_name(thing) for thing in (nn.Linear, module, 3)] == ["Linear", "Sequential", "int"]
    assert not utils.model_has_dtensor(module)
    assert not utils.is_peft_model(module)


# --- files and sizes ------------------------------------------------------------------------------------------------


def test_tied_and_sliced_tensors_can_be_written_as_safetensors(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    from safetensors.torch import load_file

    big = torch.arange(6.0).reshape(2, 3)
    state = {"a": big, "tied": big, "slice": big[:1], "turned": big.T, "empty": torch.zeros(0)}
    utils.save(state, tmp_path / "a.safetensors", safe_serialization=True)
    (record,) = caplog.records
    assert " has no tied:" in record.getMessage()
    loaded = load_file(tmp_path / "a.safetensors")
    assert set(loaded) == {"a", "slice", "turned", "empty"}
    assert torch.equal(loaded["turned"], big.T)
    assert torch.equal(loaded["slice"], big[:1])
    with pytest.raises(RuntimeError, match="type int, which safetensors"):
        utils.save(state | {"step": 3}, tmp_path / "b.safetensors", safe_serialization=True)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path):
    torch.save({"code": os.system}, tmp_path / "a.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        utils.load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("size", "count"),
    [(12, 12), ("1GB", 10**9), ("1GiB", 2**30), ("1.5 GB", 1_500_000_000), ("8Kb", 1000), ("20MB", 20_000_000)],
)
def test_sizes_are_read(size: int | str, count: int):
    assert utils.convert_file_size_to_int(size) == count


@pytest.mark.parametrize("size", ["x", "GB", "1 GX", "-1GB", -1])
def test_a_size_that_is_none_is_refused(size: Any):
    with pytest.raises(ConfigError, match="Write"):
        utils.convert_file_size_to_int(size)


def test_sizes_are_said():
    assert [utils.convert_bytes(n) for n in (1, 2048, 5 * 2**30 + 1, 2**60)] == [
        "1 bytes",
        "2.0 KB",
        "5.0 GB",
        "1024.0 PB",
    ]
    kinds = (torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, utils.CustomDtype.INT4)
    assert [utils.dtype_byte_size(kind) for kind in kinds] == [0.125, 8, 2, 1, 0.5]


# --- variables, versions, packages ----------------------------------------------------------------------------------


def test_variables_are_set_in_a_block_and_put_back(monkeypatch):
    monkeypatch.setenv("ACCELERATE_A", "before")

    def inside() -> None:
        with utils.patch_environment(accelerate_a=1, accelerate_b="x"):
            assert (os.environ["ACCELERATE_A"], os.environ["ACCELERATE_B"]) == ("1", "x")
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert os.environ["ACCELERATE_A"] == "before"
    assert "ACCELERATE_B" not in os.environ
    with utils.clear_environment():
        assert dict(os.environ) == {}
        os.environ["NEW"] = "1"
    assert os.environ["ACCELERATE_A"] == "before"
    assert "NEW" not in os.environ


def test_a_decorated_test_leaves_no_variable():
    @utils.purge_accelerate_environment
    class Tests:
        def test_a(self):
            os.environ["ACCELERATE_X"] = "1"
            return "ran"

    class More(Tests):
        def test_b(self):
            os.environ["ACCELERATE_X"] = "1"
            return "ran too"

    assert (More().test_a(), More().test_b()) == ("ran", "ran too")
    assert "ACCELERATE_X" not in os.environ


def test_variables_are_read(monkeypatch, caplog):
    monkeypatch.setenv("A_COUNT", "3")
    monkeypatch.setenv("A_FLAG", "on")
    assert utils.get_int_from_env(["NOT_SET", "A_COUNT"], 7) == 3
    assert utils.get_int_from_env(["NOT_SET"], 7) == 7
    assert (utils.parse_flag_from_env("A_FLAG"), utils.parse_flag_from_env("NOT_SET", True)) == (True, True)
    assert (utils.parse_choice_from_env("A_FLAG"), utils.parse_choice_from_env("NOT_SET")) == ("on", "no")
    assert [utils.str_to_bool(word) for word in ("yes", "False", "1")] == [1, 0, 1]
    assert utils.str_to_bool("off", to_bool=True) is False
    with pytest.raises(ValueError, match="perhaps"):
        utils.str_to_bool("perhaps")
    assert utils.convert_dict_to_env_variables({"A": "1", "B": "x y", "C;": "2"}) == ["A=1\n"]
    assert [record.args for record in caplog.records] == [("B",), ("C;",)]
    assert utils.merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}


def test_versions_are_compared(monkeypatch):
    assert utils.compare_versions("torch", ">=", "2.6")
    assert not utils.is_torch_version("<", "2.6")
    from nb_accelerate.compat import packages

    monkeypatch.setattr(packages.metadata, "version", lambda _: "2.10.0+cu124")
    assert utils.compare_versions("torch", ">", "2.9")
    assert utils.is_torch_version("==", "2.10.0")
    with pytest.raises(ConfigError, match="one of: >, >="):
        utils.compare_versions("torch", "~", "2")


def test_a_package_is_not_a_folder_of_its_name(tmp_path: Path, monkeypatch):
    from nb_accelerate.base.config.versions import is_installed

    (tmp_path / "clearml").mkdir()
    (tmp_path / "clearml" / "run.txt").write_text("")
    (tmp_path / "aim.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert not utils.is_clearml_available()
    assert utils.is_aim_available()  # installed while the program runs
    assert not is_installed("no_such_package.part")
    assert "aim" not in sys.modules


def test_every_question_about_what_is_available_has_an_answer(monkeypatch):
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    for name in utils.__all__:
        if name.startswith("is_") and name.endswith("_available"):
            assert getattr(utils, name)() in (True, False), name
    assert not utils.is_npu_available(check_device=True)
    with pytest.raises(ValueError, match="Write one of them"):
        utils.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    assert utils.are_libraries_initialized("torch", "no_such_package") == ["torch"]


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    place = utils.get_cpu_distributed_information()
    assert (place.rank, place.world_size, place.local_rank) == (1, 2, 1)
    names, count = utils.get_gpu_info()
    assert len(names) == count
    assert utils.check_cuda_p2p_ib_support() in (True, False)
    assert utils.is_port_in_use(0) is False
    utils.check_os_kernel()
    kind, setup = utils.get_current_device_type()
    assert (kind == "cpu") is (setup == "MULTI_CPU")
