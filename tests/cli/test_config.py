"""`nb-accelerate config`, and the file it writes."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from nb_accelerate.base.config.file import default_config, default_path, name_unknown, read_config, write_config
from nb_accelerate.cli import main
from nb_accelerate.cli.config import ask_config
from nb_accelerate.errors import ConfigError

# As `accelerate config` wrote it in 2023 for two GPUs of one machine.
OF_2023 = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


class Scripted:
    """Answers questions from a list of pairs: a part of the question, and the answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: tuple[str, str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        monkeypatch.setattr("builtins.input", self.read)

    def read(self, prompt: str) -> str:
        question = prompt.splitlines()[0]
        self.asked.append(question)
        return self.answers.pop(0)[1] if self.answers and self.answers[0][0] in question else ""


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]


def write(folder: Path, text: str, name: str = "a.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_a_file_of_an_older_accelerate_is_read(tmp_path: Path):
    file = read_config(write(tmp_path, OF_2023))
    assert file is not None
    assert (file.get("num_processes"), file.get("mixed_precision"), file.get("downcast_bf16")) == (2, "fp16", False)
    assert file.unknown == ()
    assert file.as_variables() == {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "false"}


def test_names_of_older_versions_get_those_of_today(tmp_path: Path):
    text = "distributed_type: 'NO'\nfp16: true\ndynamo_backend: INDUCTOR\n"
    file = read_config(write(tmp_path, text))
    assert file is not None
    assert file.get("mixed_precision") == "fp16"
    assert file.section("dynamo_config") == {"dynamo_backend": "INDUCTOR"}
    assert file.as_variables()["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def test_keys_of_sections_may_lack_their_prefix_and_unknown_ones_are_named(tmp_path: Path):
    text = "fsdp_config:\n  fsdp_ofload_params: true\ndynamo_config:\n  backend: INDUCTOR\n  use_fullgraph: true\n"
    file = read_config(write(tmp_path, text))
    assert file is not None
    assert file.as_variables() == {
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
    }
    assert re.search(r"fsdp_ofload_params'.*'fsdp_config\.fsdp_offload_params'", name_unknown(file))


def test_an_unquoted_no_means_no(tmp_path: Path):
    file = read_config(write(tmp_path, "distributed_type: NO\nmixed_precision: no\n"))
    assert file is not None
    assert (file.get("distributed_type"), file.get("mixed_precision")) == ("NO", "no")


def test_accelerate_reads_what_is_written_here_and_the_other_way_round(tmp_path: Path):
    from accelerate.commands.config.config_args import ClusterConfig

    ours = write_config(default_config(2) | {"mixed_precision": "bf16"}, tmp_path / "ours.yaml")
    read = ClusterConfig.from_yaml_file(str(ours))
    assert (read.num_processes, read.mixed_precision, read.distributed_type.value) == (2, "bf16", "MULTI_GPU")
    read.to_yaml_file(str(tmp_path / "theirs.yaml"))
    read.to_json_file(str(tmp_path / "theirs.json"))
    for name in ("theirs.yaml", "theirs.json"):
        theirs = read_config(tmp_path / name)
        assert theirs is not None
        assert theirs.unknown == ()
        assert theirs.get("num_processes") == 2


@pytest.mark.parametrize(
    "variables", [{}, {"HF_HOME": "hf"}, {"XDG_CACHE_HOME": "xdg"}, {"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}]
)
def test_the_file_lies_where_accelerate_looks_for_it(tmp_path: Path, variables: dict[str, str]):
    # The line that accelerate computes it with, without importing the package: that takes seconds.
    environ = {"HOME": str(tmp_path), **{name: str(tmp_path / folder) for name, folder in variables.items()}}
    expected = {
        frozenset(): ".cache/huggingface",
        frozenset({"HF_HOME"}): "hf",
        frozenset({"XDG_CACHE_HOME"}): "xdg/huggingface",
        frozenset({"HF_HOME", "XDG_CACHE_HOME"}): "hf",
    }[frozenset(variables)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        assert default_path(environ) == tmp_path / expected / "accelerate" / "default_config.yaml"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_processes: two\n", ["num_processes='two'", "whole number"]),
        ("num_processes: 0\n", ["num_processes=0", "at least 1"]),
        ("num_machines: a:b\n", ["num_machines='a:b'", "whole number"]),
        ("mixed_precision: bf17\n", ["mixed_precision='bf17'", "Did you mean 'bf16'?"]),
        ("use_cpu: perhaps\n", ["use_cpu='perhaps'", "yes or no"]),
        ("tpu_use_sudo: true\n", ["tpu_use_sudo=True", "gcloud", "Write tpu_use_sudo: false"]),
        ("tpu_use_cluster: 'yes'\n", ["tpu_use_cluster='yes'", "Write tpu_use_cluster: false"]),
        ("fsdp_config: yes\n", ["fsdp_config=True", "section"]),
        ("compute_environment: AMAZON_SAGEMAKER\n", ["AMAZON_SAGEMAKER", "your own machines"]),
        ("- a\n- b\n", ["num_processes: 2"]),
        ("a: [\n", ["cannot be read"]),
        ("num_machines: 1:4\n", ["num_machines='1:4'", "Write an integer of at least 1"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_file_and_key(tmp_path: Path, text: str, words: list[str]):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    assert all(word in str(caught.value) for word in [str(file), *words])


def test_a_file_that_is_not_there_is_an_error_only_if_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert read_config() is None
    with pytest.raises(ConfigError, match="nb-accelerate config --config_file"):
        read_config(tmp_path / "a.yaml")


def test_keys_that_nobody_knows_are_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, f"{OF_2023}num_proceses: 4\n")
    file = read_config(path)
    assert file is not None
    assert re.search("'num_proceses'.*'num_processes'", name_unknown(file))
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert yaml.safe_load(path.read_text())["num_proceses"] == 4
    assert "num_proceses" in capsys.readouterr().out


def test_keys_of_older_versions_of_accelerate_are_not_told_as_unknown(tmp_path: Path):
    file = read_config(write(tmp_path, f"{OF_2023}ipex_config:\n  ipex: false\nuse_xpu: false\n"))
    assert file is not None
    assert name_unknown(file) == ""


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path):
    path = write(tmp_path, OF_2023)
    with pytest.raises(ConfigError, match="num_processes=0"):
        write_config({"num_processes": 0}, path)
    assert path.read_text() == OF_2023
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.yaml"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_config({}, path / "below" / "a.yaml")


def test_who_has_no_home_has_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Batch systems and ``env -i``: no HOME, and no entry in the password file."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    assert default_path() == Path("~/.cache/huggingface/accelerate/default_config.yaml")  # as accelerate has it
    assert main(["config", "default"]) == 0
    assert read_config() is not None


def test_config_default_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "made" / "a.yaml"
    command = ["config", "default", "--config-file", str(path), "--mixed-precision", "bf16"]
    assert main(command) == 0
    before = path.read_text()
    assert yaml.safe_load(before)["mixed_precision"] == "bf16"
    assert main([*command[:-1], "no"]) == 0
    assert path.read_text() == before
    assert "was not changed" in capsys.readouterr().out


def test_one_gpu_machine_after_another_is_asked_what_matters_there(monkeypatch: pytest.MonkeyPatch):
    on_cpu = Scripted(monkeypatch)
    assert ask_config() == default_config()
    assert not any("GPU" in question for question in on_cpu.asked[1:])
    Scripted(monkeypatch, ("GPUs of this machine", "0,2"))
    assert ask_config(num_gpus=4)["gpu_ids"] == "0,2"


def test_several_machines_are_asked_for_where_they_meet_and_mistakes_are_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asker = Scripted(
        monkeypatch,
        ("Train in one", "MULTI_CPU"),
        ("Number of machines", "two"),
        ("Number of machines", "2"),
        ("Number of this machine", "2"),
        ("Number of this machine", "1"),
        ("Address", ""),
        ("Address", "10.0.0.1"),
        ("Number of processes", "0"),
        ("Number of processes", "6"),
        ("torch.compile", "inductor"),
        ("Mixed", "bf16"),
    )
    found = ask_config()
    assert asker.answers == []
    mistakes = said(capsys)
    assert len(mistakes) == 4
    for words, mistake in zip(
        ("num_machines='two'", "from 0 to 1", "needed", "num_processes=0"), mistakes, strict=True
    ):
        assert words in mistake
    assert found["use_cpu"] is True
    assert (found["num_machines"], found["machine_rank"], found["main_process_ip"]) == (2, 1, "10.0.0.1")
    assert (found["num_processes"], found["mixed_precision"]) == (6, "bf16")
    assert found["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}


ENGINES = [
    (
        "FSDP",
        [("What is gathered", "SIZE_BASED_WRAP"), ("Parameters of such", "2000")],
        {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "2000"},
    ),
    (
        "FSDP",
        [("What is saved", "sharded_state_dict"), ("Compute act", "yes")],
        {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
    ),
    (
        "DEEPSPEED",
        [("Stage", "3"), ("state of the optimizer", "cpu"), ("Where are param", "cpu")],
        {
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        },
    ),
    ("DEEPSPEED", [("JSON file", "ds.json")], {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}),
]


@pytest.mark.parametrize(("engine", "answers", "variables"), ENGINES)
def test_answers_about_an_engine_make_a_file_that_accelerate_reads(
    engine: str,
    answers: list[tuple[str, str]],
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    from accelerate.commands.config.config_args import ClusterConfig

    asker = Scripted(monkeypatch, ("Train in one", "MULTI_GPU"), ("How is the model kept", engine), *answers)
    path = write_config(ask_config(num_gpus=4), tmp_path / "a.yaml")
    assert asker.answers == []
    file = read_config(path)
    assert file is not None
    assert file.unknown == ()
    assert variables.items() <= file.as_variables().items()
    theirs = ClusterConfig.from_yaml_file(str(path))
    section = "fsdp_config" if engine == "FSDP" else "deepspeed_config"
    assert getattr(theirs, section) == dict(file.section(section))
    assert (theirs.distributed_type.value, theirs.num_processes) == (engine, 4)


def test_layers_are_split_over_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Scripted(monkeypatch, ("Train in one", "MULTI_GPU"), ("How is the model kept", "TENSOR_PARALLEL"))
    file = read_config(write_config(ask_config(num_gpus=4), tmp_path / "a.yaml"))
    assert file is not None
    variables = file.as_variables()
    assert variables["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert "ACCELERATE_USE_FSDP" not in variables
    assert variables["PARALLELISM_CONFIG_TP_SIZE"] == "4"


def test_a_tpu_that_is_there_is_used_by_default(monkeypatch: pytest.MonkeyPatch):
    asker = Scripted(monkeypatch, ("Mixed", "bf16"))
    for found in (default_config(0, 1), ask_config(0, 1)):
        assert (found["distributed_type"], found["num_processes"], found["use_cpu"]) == ("XLA", 1, False)
    assert not any("model kept" in question or "GPU" in question for question in asker.asked[1:])
    Scripted(monkeypatch, ("Train in one", "XLA"))
    assert ask_config()["num_processes"] == 8
    both = default_config(2, 8)
    assert (both["distributed_type"], both["num_processes"]) == ("MULTI_GPU", 2)


def test_answers_can_be_piped_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a.json"
    # Several processes on CPUs; one machine; two processes; nothing is compiled; an answer that is none.
    monkeypatch.setattr(sys, "stdin", io.StringIO("MULTI_CPU\n\n2\n\nperhaps\nbf16\n"))
    assert main(["config", "--config_file", str(path)]) == 0
    written = json.loads(path.read_text())
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_CPU", 2)
    assert written["mixed_precision"] == "bf16"
    shown = capsys.readouterr().out
    assert "'perhaps'" in shown
    assert f"wrote {path}" in shown


def test_input_that_ends_too_early_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.StringIO("MULTI_CPU\n"))
    assert main(["config", "--config_file", str(tmp_path / "a.yaml")]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return file


@pytest.mark.contract("commands: config")
def test_the_file_is_behind_arguments_and_environment_for_launches_and_accelerators(
    default_file: Path, capsys: pytest.CaptureFixture[str]
):
    from nb_accelerate import notebook_launcher

    def precision(*arguments: str) -> tuple[int, str]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator(mixed_precision=arguments[0] if arguments else None)
        return accelerator.num_processes, accelerator.mixed_precision

    default_file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    assert notebook_launcher(precision) == [(2, "bf16"), (2, "bf16")]
    assert f"num_processes=2, devices='cpu': from {default_file}" in capsys.readouterr().out
    assert notebook_launcher(precision, num_processes=1, env={"ACCELERATE_MIXED_PRECISION": "no"}) == [(1, "no")]
    assert notebook_launcher(precision, ("no",), num_processes=1) == [(1, "no")]
    default_file.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\nnum_machines: 2\n")
    assert notebook_launcher(precision) == [(1, "no")]
    default_file.write_text("num_processes: many\n")
    with pytest.raises(ConfigError, match=str(default_file)):
        notebook_launcher(precision, num_processes=1)


def test_env_says_what_the_file_says(default_file: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["env"]) == 0
    assert f"none (nb-accelerate config writes {default_file})" in capsys.readouterr().out
    default_file.write_text("num_processes: 2\nmixed_precision: bf16\n")
    assert main(["env"]) == 0
    assert f"{default_file}: mixed_precision=bf16, num_processes=2" in capsys.readouterr().out


def test_a_variable_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NB_ACCELERATE_CONFIG_FILE", str(tmp_path / "a.yaml"))
    with pytest.raises(ConfigError, match="configuration file"):
        read_config()
    write(tmp_path, OF_2023)
    file = read_config()
    assert file is not None
    assert file.get("num_processes") == 2
