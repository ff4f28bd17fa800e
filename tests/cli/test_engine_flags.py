"""Flags and sections of the configuration file about FSDP, DeepSpeed and TPUs, as variables for the ranks."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.file import NO_FILE, name_unknown, read_config, write_config
from nb_accelerate.cli import main, make_parser
from nb_accelerate.cli.flags import add_flags
from nb_accelerate.cli.launch import chosen_engine, launch_options, rank_variables

FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "Block,Head",
    "fsdp_offload_params": True,
    "fsdp_reshard_after_forward": False,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_min_num_params": 2000,
    "fsdp_activation_checkpointing": True,
}
DEEPSPEED = {
    "zero_stage": 3,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
    "deepspeed_moe_layer_cls_names": "Experts",
}
SECTIONS = {"FSDP": ("fsdp_config", FSDP), "DEEPSPEED": ("deepspeed_config", DEEPSPEED)}
SWITCHES = {"FSDP": "--use_fsdp", "DEEPSPEED": "--use_deepspeed"}
OF_ENGINES = (
    "FSDP_",
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DEEPSPEED",
    "ACCELERATE_CONFIG_DS",
)
OF_ENGINES += ("ACCELERATE_GRADIENT_", "XLA_")


def flags_for(kind: str) -> list[str]:
    _, options = SECTIONS[kind]
    said = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return [SWITCHES[kind], *said]


def file_for(kind: str, folder: Path) -> Path:
    section, options = SECTIONS[kind]
    file = folder / "config.json"
    values = {"distributed_type": kind, "num_processes": 1, "mixed_precision": "bf16", section: options}
    file.write_text(json.dumps(values))
    return file


def variables_of(*flags: str) -> dict[str, str]:
    arguments = make_parser().parse_args(["launch", *flags, "train.py"])
    found = launch_options(arguments, read_config(arguments.config_file) or NO_FILE)["env"]
    return {name: value for name, value in found.items() if os.environ.get(name) != value}


def of_engines(*flags: str) -> dict[str, str]:
    return {name: value for name, value in variables_of(*flags).items() if name.startswith(OF_ENGINES)}


@pytest.mark.parametrize("kind", SECTIONS)
def test_flags_and_file_ask_for_the_same(kind: str, tmp_path: Path) -> None:
    of_flags = of_engines("--cpu", *flags_for(kind))
    file = file_for(kind, tmp_path)
    of_file = of_engines("--cpu", "--config_file", str(file))
    fields = of_file.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    assert fields == (None if kind == "FSDP" else ",".join([*DEEPSPEED, "mixed_precision"]))
    of_flags.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    assert of_flags == of_file
    found = read_config(file)
    assert found is not None
    assert of_file.items() <= found.as_variables().items()  # what an Accelerator reads without a launch


def test_a_flag_comes_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    found = of_engines("--cpu", "--use_fsdp", "--fsdp_version=2")
    assert found["FSDP_VERSION"] == "2"
    assert "FSDP_OFFLOAD_PARAMS" not in found  # a dry run prints what is changed
    assert found["FSDP_SYNC_MODULE_STATES"] == "true"


@pytest.mark.parametrize("kind", SECTIONS)
def test_the_environment_turns_the_engine_of_the_file_off(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "false")
    file = file_for(kind, tmp_path)
    found = of_engines("--cpu", "--config_file", str(file))
    assert f"ACCELERATE_USE_{kind}" not in found  # a dry run prints what is changed


def test_another_kind_of_flag_turns_the_engine_of_the_file_off(tmp_path: Path) -> None:
    file = file_for("FSDP", tmp_path)
    found = of_engines("--multi_gpu", "--config_file", str(file))
    assert found == {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "false"}


def test_bf16_on_a_tpu_leaves_weights_in_32_bits_unless_that_is_asked_for(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    for downcast, expected in ((False, {}), (True, {"XLA_DOWNCAST_BF16": "1"})):
        flags = ["--tpu", "--mixed_precision=bf16", *(["--downcast_bf16"] if downcast else [])]
        precision = {"ACCELERATE_MIXED_PRECISION": "bf16"}
        assert rank_variables(parser.parse_args(flags), NO_FILE, "XLA") == expected | precision
        values = {"distributed_type": "XLA", "mixed_precision": "bf16", "downcast_bf16": downcast}
        found = read_config(write_config(values, tmp_path / f"{downcast}.json"))
        assert found is not None
        assert found.engine_variables("XLA") == expected


@pytest.mark.parametrize(("flag", "of_file"), [("--use_deepspeed", "FSDP"), ("--use_fsdp", "DEEPSPEED")])
def test_a_flag_for_one_engine_turns_the_engine_of_the_file_off(flag: str, of_file: str, tmp_path: Path) -> None:
    file = file_for(of_file, tmp_path)
    found = of_engines("--cpu", flag, "--config_file", str(file))
    assert found[f"ACCELERATE_USE_{of_file}"] == "false"  # else ranks would read it in the file, and find both
    assert found[f"ACCELERATE_{flag[2:].upper()}"] == "true"


@pytest.mark.parametrize(("flags", "expected"), [(["--use_fsdp"], 1), (["--multi_gpu"], 1), ([], 2)])
def test_accumulation_of_an_engine_that_flags_replace_does_not_count(
    flags: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_for("DEEPSPEED", tmp_path)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    arguments = parser.parse_args([*flags, "--config_file", str(file)])
    engine = chosen_engine(arguments, read_config(file))
    for name, value in rank_variables(arguments, read_config(file), engine).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NB_ACCELERATE_CONFIG_FILE", str(file))  # as launch does
    assert (Environment().gradient_accumulation_steps or 1) == expected


@pytest.mark.parametrize("prefix", ["parallelism_config_", ""])
def test_sizes_of_a_mesh_are_said_by_flags_and_file(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 1, "cp_size": 1}  # as `accelerate config` asks
    file = tmp_path / "config.json"
    section = {f"{prefix}{name}": size for name, size in sizes.items()}
    file.write_text(
        json.dumps({"distributed_type": "FSDP", "use_cpu": True, "num_processes": 2, "parallelism_config": section})
    )
    assert name_unknown(read_config(file)) == ""  # type: ignore[arg-type]
    flags = ["--use_fsdp", "--num_processes=2", "--use_parallelism_config"]
    flags += [f"--parallelism_config_{name}={size}" for name, size in sizes.items()]
    found = []
    for given in (["--config_file", str(file)], flags):
        said = variables_of("--cpu", *given)
        found.append({name: value for name, value in said.items() if "PARALLELISM" in name})
    assert found[0] == found[1]
    assert (found[0]["ACCELERATE_USE_PARALLELISM_CONFIG"], found[0]["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == (
        "true",
        "2",
    )
    assert main(["launch", *flags, "--num_processes=3", __file__]) == 2
    assert re.search(r"2 ranks .*dp_shard_size=2", capsys.readouterr().err)
    assert main(["launch", "--cpu", "--parallelism_config_dp_shard_size=2", __file__]) == 2
    assert "Add --use_parallelism_config" in capsys.readouterr().err


THEIRS = """
import json, os, sys
from accelerate.commands import launch
from accelerate.utils import launch as tools
before = dict(os.environ)
found = []
def keep(environ):
    found.append({name: value for name, value in environ.items() if before.get(name) != value})
launch.deepspeed_launcher = lambda args: keep(tools.prepare_deepspeed_cmd_env(args)[1])
launch.multi_gpu_launcher = lambda args: keep(tools.prepare_multi_gpu_env(args))
for flags in json.loads(sys.argv[1]):
    sys.argv[1:] = flags  # it looks there for what was given
    launch.launch_command(launch.launch_command_parser().parse_args(flags))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_variables_are_those_that_accelerate_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    lines = []
    for kind in SECTIONS:
        (tmp_path / kind).mkdir()
        lines += [flags_for(kind), [SWITCHES[kind]], ["--config_file", str(file_for(kind, tmp_path / kind))]]
    common = ["--num_processes=1", "--main_process_port=0"]
    asked = json.dumps([[*common, *flags, "train.py"] for flags in lines])
    run = subprocess.run([sys.executable, "-c", THEIRS, asked], capture_output=True, text=True, check=True, timeout=60)
    for flags, theirs in zip(lines, json.loads(run.stdout.splitlines()[-1]), strict=True):
        expected = {name: value for name, value in theirs.items() if name.startswith(OF_ENGINES)}
        if "FSDP_VERSION" in expected:
            expected["FSDP_VERSION"] = "2"  # accelerate takes 1 if nothing is said
        assert of_engines(*flags) == expected


def test_the_environment_reads_the_engine_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NB_ACCELERATE_CONFIG_FILE", str(file_for("FSDP", tmp_path)))
    assert Environment().flag("ACCELERATE_USE_FSDP") is True
    assert Environment().text("FSDP_TRANSFORMER_CLS_TO_WRAP") == "Block,Head"


TRAIN = """
import torch
from nb_accelerate import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(4, 2))
print(accelerator.distributed_type, type(model.weight).__name__)
"""


@pytest.mark.slow
def test_use_fsdp_shards_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert main(["launch", "--cpu", "--quiet", "--use_fsdp", "--num_processes=2", str(script)]) == 0
    assert capsys.readouterr().out == "FSDP DTensor\n" * 2
