from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

import nb_accelerate


@pytest.fixture
def shell() -> InteractiveShell:
    return SimpleNamespace()  # type: ignore[return-value]  # what the extension does not touch need not be there


def test_unloading_gives_the_warm_processes_back(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setitem(sys.modules, "nb_accelerate.launch", SimpleNamespace(close=lambda: closed.append(True)))
    nb_accelerate.load_ipython_extension(shell)
    assert not closed
    nb_accelerate.unload_ipython_extension(shell)
    assert closed == [True]


def test_unloading_where_nothing_was_launched_loads_nothing(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "nb_accelerate.launch", raising=False)
    nb_accelerate.unload_ipython_extension(shell)
    assert "nb_accelerate.launch" not in sys.modules


def test_the_launcher_has_what_unloading_calls():
    from nb_accelerate import launch

    launch.close()  # also where nothing is running
    launch.close()
