from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pexpect
import pytest

from nb_accelerate.cli import completion, main, make_parser


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def _completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of some words."""
    typed = " ".join(f"'{word}'" for word in ("nb-accelerate", *words))
    program = (
        f'{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _nb_accelerate; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    run = subprocess.run(["bash", "-uc", program], capture_output=True, text=True, timeout=30, check=True)
    assert run.stderr == ""
    return run.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("la",), ["launch"]),
        (("config", "up"), ["update"]),
        (("config", "update", "--config_"), ["--config_file"]),
        (("launch", "--cpu", "--num_pro"), ["--num_processes"]),
        (("launch", "--mixed_precision", "bf"), ["bf16"]),
        (("completion", ""), ["bash", "fish", "zsh"]),
        (("config", ""), ["default", "update"]),
        (("launch", "train"), []),  # a file: bash completes it
        (("launch", "$(touch broken)", "--num_pro"), ["--num_processes"]),
    ],
)
def test_bash_offers_what_can_follow(words: tuple[str, ...], offered: list[str], capsys: pytest.CaptureFixture[str]):
    assert _completed(_script("bash", capsys), *words) == offered


def test_every_option_of_the_parsers_is_offered(capsys: pytest.CaptureFixture[str]):
    commands = {command.words: command for command in completion.commands_of(make_parser())}
    assert {"", "launch", "config default", "estimate-memory", "completion"} <= set(commands)
    script = _script("bash", capsys)
    offered = _completed(script, "launch", "--")
    assert offered == [one for spellings in commands["launch"].options for one in spellings if one.startswith("--")]
    assert len(offered) > 30


def test_fish_has_a_line_for_every_command_and_option(capsys: pytest.CaptureFixture[str]):
    lines = _script("fish", capsys).splitlines()
    commands = list(completion.commands_of(make_parser()))
    assert len(lines) == sum(
        len(command.options) + bool(command.words) + bool(command.arguments) for command in commands
    )
    assert any(
        "-l mixed_precision -x -a" in line or "-l mixed_precision -l mixed-precision -x -a" in line for line in lines
    )


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_shell_can_read_its_script(shell: str, capsys: pytest.CaptureFixture[str]):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([program, "-n"], input=_script(shell, capsys), text=True, timeout=30, check=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("la", ["launch"]),
        ("config up", ["update"]),
        ("launch --cpu --num_pro", ["--num_processes"]),
        ("launch --mixed_precision bf", ["bf16"]),
        ("completion ", ["bash", "fish", "zsh"]),
    ],
)
@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish_offers_what_can_follow(
    typed: str, offered: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    program = f"{_script('fish', capsys)}\ncomplete -C 'nb-accelerate {typed}'"
    run = subprocess.run(["fish", "--no-config", "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert run.stderr == ""
    assert [line.split("\t")[0] for line in run.stdout.splitlines()] == offered


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_completes_also_where_nothing_has_started_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")  # a terminal that knows no colours and moves
    script = _script("zsh", capsys)
    shell = pexpect.spawn("zsh", ["-f", "-i"], encoding="utf-8", timeout=20, dimensions=(24, 200))
    try:
        (tmp_path / "completion").write_text(script)
        shell.sendline(f"PS1='rea''dy> '; source {tmp_path / 'completion'}")
        shell.expect_exact("ready> ")
        assert "not found" not in str(shell.before)
        for typed, completed in (
            ("la", "launch "),
            ("launch --cpu --num_pro", "launch --cpu --num_processes "),
            ("launch --mixed_precision bf", "launch --mixed_precision bf16 "),
        ):
            shell.send(f"nb-accelerate {typed}\t")
            shell.expect_exact(f"nb-accelerate {completed}")
            shell.sendcontrol("u")
    finally:
        shell.close(force=True)
