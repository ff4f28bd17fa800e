"""A launch whose output cannot be shown runs all the same, and says so."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nb_accelerate.errors import LaunchError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.ranks.output.merge import Merge
from nb_accelerate.notebook.ranks.output.rank_output import RankOutput
from nb_accelerate.notebook.ranks.output.sinks import CellSink


def talk() -> str:
    print("caf\u00e9", flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    return "returned"


def launch(**options: Any) -> list[Any]:
    return list(notebook_launcher(talk, num_processes=2, start_method="forkserver", **{"progress": "off", **options}))


class Session:
    """Takes what a cell would show."""

    def __init__(self) -> None:
        self.shown = ""

    def send(self, _socket: Any, kind: str, content: dict[str, Any], **_: Any) -> None:
        self.shown += content["text"] if kind == "stream" else content["data"]["text/plain"] + "\n"


class Kernel:
    iopub_socket = None

    def __init__(self) -> None:
        self.session = Session()

    def get_parent(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Session:
    """The launches of this test are in this cell."""
    kernel = Kernel()
    # pytest's streams are not the kernel's, so they would be taken for what the cell has redirected.
    monkeypatch.setattr("nb_accelerate.notebook.ranks.output.sinks._unless_kernels", lambda _: None)
    monkeypatch.setattr("nb_accelerate.notebook.launch.launcher.sink_here", lambda: CellSink(kernel))
    return kernel.session


def fail(*_: Any, **__: Any) -> Any:
    raise PermissionError("not yours")


@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_what_the_cell_does_not_take_is_missing_and_nothing_else(
    cell: Session, monkeypatch: pytest.MonkeyPatch, method: str
):
    monkeypatch.setattr(CellSink, method, fail)
    assert launch() == ["returned", "returned"]
    if method == "write":  # said as a display then
        assert cell.shown.count("shown (PermissionError: not yours)") == 1


@pytest.mark.parametrize(
    ("place", "name", "options"),
    [
        (Merge, "add", {"fold_output": True}),
        (Merge, "finish", {"fold_output": True}),
        (RankOutput, "feed", {}),
        (RankOutput, "finish", {}),
    ],
)
def test_so_is_what_is_lost_on_the_way_there(
    cell: Session, monkeypatch: pytest.MonkeyPatch, place: type, name: str, options: dict[str, Any]
):
    monkeypatch.setattr(place, name, fail)
    assert launch(**options) == ["returned", "returned"]
    assert cell.shown.count("could not be shown") == 1


def test_a_panel_that_cannot_be_made_is_missing(cell: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nb_accelerate.notebook.launch.launch.make_panel", fail)
    monkeypatch.setattr("nb_accelerate.notebook.launch.launcher.announce", fail)
    assert launch(progress="text") == ["returned", "returned"]


def test_a_rank_whose_messages_cannot_be_read_ends_the_launch_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    drain, failed = Channel.drain, []

    def fail_once(channel: Channel) -> Any:
        if not failed:
            failed.append(1)
            raise EOFError("half a message")
        return drain(channel)

    monkeypatch.setattr(Channel, "drain", fail_once)
    with pytest.raises(LaunchError, match=r"rank [01] .*EOFError: half"):
        launch()
