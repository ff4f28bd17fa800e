"""Whatever bytes ranks write, in whatever pieces they arrive: nothing raises, nothing is lost, nothing takes long."""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.session import json_packer

from nb_accelerate.notebook.display.drawing.block import Block
from nb_accelerate.notebook.protocol.messages import Display
from nb_accelerate.notebook.protocol.output import MAX_PAYLOAD, frame, new_mark
from nb_accelerate.notebook.ranks.output import sinks
from nb_accelerate.notebook.ranks.output.rank_output import RankOutput
from nb_accelerate.notebook.ranks.output.request_output import DisplayIds, RequestOutput
from nb_accelerate.notebook.ranks.output.sinks import CellSink, Sink, StreamSink

MARK = new_mark()


class Page(Sink):
    """Keeps what it is given, if it could be sent to a notebook."""

    due = float("inf")

    def __init__(self) -> None:
        self.text = ""
        self.displays: list[dict[str, Any]] = []

    def write(self, stream: str, text: str) -> None:
        assert stream in ("stdout", "stderr")
        json_packer({"text": text})
        self.text += text

    def display(self, kind: str, content: dict[str, Any]) -> None:
        assert kind in ("display_data", "update_display_data", "clear_output")
        json_packer(sinks._sendable(content))
        self.displays.append(content)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


ODD = [None, 3, [], [1], "text", "a\ud800b", float("nan"), {"text/plain": "a figure"}, {"text/plain": None}, {"k": {}}]


class Speaker:
    """One rank's random output, as bytes of its pipe."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.random = random.Random(f"{seed} {rank}")
        self.lines: list[str] = []
        self.displays: list[Display] = []

    def speak(self) -> bytes:
        pieces = []
        for number in range(self.random.randint(0, 12)):
            kind = self.random.choice(["line", "line", "error", "junk", "bar", "display", "record", "half"])
            if kind in ("line", "error"):
                line = f"<{self.rank}.{number}> grüße 🎉" + "x" * self.random.choice([0, 5, 300])
                self.lines.append(line)
                data = f"\n{line}\n".encode()
                pieces.append(data if kind == "line" else frame(MARK, data[:MAX_PAYLOAD]))
            elif kind == "junk":
                pieces.append(self.random.randbytes(self.random.randint(1, 40)))
            elif kind == "half":
                pieces.append(MARK[: self.random.randint(1, 15)] + b"\xf0\x9f")
            elif kind == "bar":
                pieces.append(b"\r10%\r" + b" " * 5 + b"\r20%" * self.random.randint(1, 3))
            elif kind == "record":
                pieces.append(frame(MARK, self.random.choice([b"", b"[]", b'{"run": 1, "row": 3}', b"\xff"]), "record"))
            else:
                pieces.append(frame(MARK, b"", "display"))
                content = {name: self.random.choice(ODD) for name in ("data", "metadata", "transient")}
                self.displays.append(
                    Display(kind=self.random.choice(["result", "display_data"]), content=json.dumps(content))
                )
        return b"".join(pieces)


def check(seed: int) -> None:
    choose = random.Random(seed)
    ranks = range(choose.randint(1, 3))
    page = Page()
    style = choose.choice(["fold", "group", "raw"])
    asked = choose.choice([list(ranks), [0]])  # the others do not run the cell, and print all the same
    cell = RequestOutput(asked, page, DisplayIds(), style=style)
    speakers = [Speaker(rank, seed) for rank in ranks]

    def output_of(speaker: Speaker) -> RankOutput:
        waiting = iter(speaker.displays)
        return RankOutput(
            MARK,
            lambda stream, text: cell.text(speaker.rank, stream, text),
            alone=cell.alone and speaker.rank in asked,
            on_display=lambda: cell.display(speaker.rank, next(waiting)),
        )

    streams = [speaker.speak() for speaker in speakers]
    outputs = [output_of(speaker) for speaker in speakers]
    while any(streams):
        rank = choose.choice([rank for rank in ranks if streams[rank]])
        size = choose.choice([1, 3, 50, 1000])
        outputs[rank].feed(streams[rank][:size])
        streams[rank] = streams[rank][size:]
        if choose.random() < 0.1:
            cell.flush()
    for output in outputs:
        output.finish()
    cell.close()
    for speaker in speakers:
        if cell.alone and speaker.rank in asked and len(ranks) > 1:
            continue  # what it prints is shown at once, and others may print in the middle of its line
        places = [page.text.find(line) for line in speaker.lines]
        assert -1 not in places, f"{speaker.lines[places.index(-1)]!r} is lost"
        assert places == sorted(places), f"the lines of rank {speaker.rank} are out of order"


class TestBytes:
    @pytest.mark.parametrize("seeds", [range(120), pytest.param(range(1000, 5000), marks=pytest.mark.slow)])
    def test_any_bytes_in_any_pieces_are_shown(self, seeds: range):
        for seed in seeds:
            try:
                check(seed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error

    @pytest.mark.limit(20)
    def test_much_without_a_newline_takes_time_in_proportion(self):
        seen = []
        output = RankOutput(MARK, lambda _, text: seen.append(text), alone=False)
        piece = b"x" * 4000
        for _ in range(16_000):  # 64 MB
            output.feed(piece)
        output.finish()
        assert "".join(seen).replace("\n", "") == "x" * (16_000 * 4000)
        assert len(seen) < 100
        assert len(output.text) < 20_000_000

    def test_of_a_bar_only_the_last_drawing_is_passed_on(self):
        seen = []
        output = RankOutput(MARK, lambda _, text: seen.append(text), alone=False)
        for number in range(10_000):
            output.feed(f"\r{number:5} of 10000 [{'=' * 40}]".encode())
            assert len(output.text) < 100
        output.feed(b"\r       \r\nnext\r\n")
        assert seen == [f" 9999 of 10000 [{'=' * 40}]\r\nnext\r\n"]


class Kernel:
    """As much of a kernel as a sink needs; its session packs as a real one does."""

    def __init__(self) -> None:
        self.session = self
        self.iopub_socket = None
        self.shell = None
        self.sent: list[tuple[str, Any]] = []
        self.is_closed = False

    def get_parent(self) -> None:
        return None

    def send(self, _socket: None, kind: str, content: Any, *, parent: None) -> None:
        if self.is_closed:
            raise OSError("closed")
        self.sent.append((kind, json.loads(json_packer(content))))


class TestCellSink:
    @pytest.fixture(autouse=True)
    def _streams_are_the_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sinks, "_unless_kernels", lambda _: None)

    @pytest.mark.may_leave("files")
    def test_a_log_on_a_full_disk_ends_there_and_the_cell_goes_on(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(sinks, "LINE_LIMIT", 10)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # so Python gets an error
        kernel = Kernel()
        sink = CellSink(kernel)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
        try:
            for number in range(20_000):
                sink.write("stdout", f"line {number}\n")
            sink.flush()
            sink.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        kind, content = kernel.sent[-1]
        text = content["data"]["text/plain"]
        assert kind == "update_display_data"
        assert text.startswith("... 19,990 more lines;")
        assert "more (File too large)" in text
        assert text.endswith("line 19999")
        Path(text.split()[6]).unlink()

    @pytest.mark.may_leave("files")
    def test_a_bar_that_goes_on_for_long_is_one_line_of_the_tail(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(sinks, "SIZE_LIMIT", 100)
        kernel = Kernel()
        sink = CellSink(kernel)
        for number in range(1000):
            sink.write("stderr", f"\r{number:4} of 1000")
        sink.flush()
        text = kernel.sent[-1][1]["data"]["text/plain"]
        assert text.endswith("\n 999 of 1000")
        log = Path(re.search(r"in (\S+)\. The last", text)[1])
        assert log.read_text().endswith(" 999 of 1000"), "while the cell runs"
        sink.close()
        log.unlink()

    def test_nothing_is_raised_where_the_kernel_is_gone(self):
        kernel = Kernel()
        sink = CellSink(kernel)
        kernel.is_closed = True
        sink.write("stdout", "text\n")
        sink.display("display_data", {"data": {"text/plain": "a\ud800"}, "metadata": {}, "transient": {}})
        sink.close()
        assert kernel.sent == []

    def test_what_no_message_can_carry_is_named(self):
        kernel = Kernel()
        sink = CellSink(kernel)
        sink.display("display_data", {"data": {"text/plain": {1j: object()}}, "metadata": {}, "transient": {}})
        sink.write("stdout", "after\n")
        sink.close()
        assert [kind for kind, _ in kernel.sent] == ["stream", "stream"]
        assert kernel.sent[0][1]["text"].startswith("<a message ")


def test_a_panel_in_a_terminal_that_knows_no_such_letters_shows_escapes_and_none_in_one_that_is_closed():
    raw = io.BytesIO()
    terminal = io.TextIOWrapper(raw, encoding="ascii")
    block = Block(terminal)
    block.draw_lines(["\u2588 50%"])
    assert raw.getvalue() == b"\\u2588 50%\n"
    terminal.close()
    block.hide()
    block.show()


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise RuntimeError("a stream of the user's own")


def test_a_stream_of_the_users_own_may_raise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", Broken())
    sink = StreamSink()
    sink.write("stdout", "text\n")
    sink.display("display_data", {"data": {"text/plain": "text"}})
    sink.close()


SCRIPT = r"""
from nb_accelerate import notebook_launcher
notebook_launcher(lambda: print("gr\xfc\xdfe \ud800 \U0001f389"), (), 1, progress="text")
"""


def test_a_stream_that_knows_no_umlauts_gets_escapes(monkeypatch: pytest.MonkeyPatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    sink = StreamSink()
    sink.write("stdout", "gr\xfc\xdfe \ud800\n")
    sink.display("display_data", {"data": {"text/plain": "\U0001f389"}})
    sink.close()
    assert raw.getvalue() == b"gr\\xfc\\xdfe \\ud800\n\\U0001f389\n"


@pytest.mark.slow
def test_a_launch_in_a_console_that_knows_no_umlauts_shows_escapes():
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "gr\\xfc\\xdfe \\ud800 \\U0001f389\n" in done.stdout

    @pytest.mark.parametrize("alone", [True, False])
    def test_the_line_that_gloo_prints_of_each_group_is_left_out(self, alone: bool):
        seen = []
        output = RankOutput(MARK, lambda _, text: seen.append(text), alone=alone)
        line = "[Gloo] Rank 0 is connected to {} peer ranks. Expected number of connected peer ranks is : {}\n"
        for text in ("mine, ", line.format(1, 1), "and on\n", line.format(12, 12), line.format(1, 3), "last\n"):
            output.feed(text.encode())
        output.finish()
        assert "".join(seen) == output.text == "mine, and on\n" + line.format(1, 3) + "last\n"
