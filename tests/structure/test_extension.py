from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import nb_accelerate


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> InteractiveShell:
    monkeypatch.setenv("NB_ACCELERATE_KEEP_WARM", "0")  # loading would start the process that ranks are forked from
    config = Config()
    config.HistoryManager.enabled = False
    return InteractiveShell(config=config)


def what_the_extension_touches(shell: InteractiveShell) -> dict[str, list[str]]:
    return {
        "cell magics": sorted(shell.magics_manager.magics["cell"]),
        "line magics": sorted(shell.magics_manager.magics["line"]),
        "transformers": [str(one) for one in shell.input_transformers_cleanup],
        "matchers": [str(one) for one in shell.Completer.custom_matchers],
        "own attributes": sorted(set(vars(shell)) & {"object_inspect_mime"}),
    }


def test_unloading_undoes_what_loading_did(shell: InteractiveShell):
    before = what_the_extension_touches(shell)
    nb_accelerate.load_ipython_extension(shell)
    loaded = what_the_extension_touches(shell)
    assert {"distributed", "rank", "local"} <= set(loaded["cell magics"])
    assert "distributed" in loaded["line magics"]
    nb_accelerate.unload_ipython_extension(shell)
    assert what_the_extension_touches(shell) == before


def test_unloading_gives_the_warm_processes_back(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch):
    closed = []
    monkeypatch.setitem(
        sys.modules, "nb_accelerate.notebook.launch", SimpleNamespace(close=lambda: closed.append(True))
    )
    nb_accelerate.unload_ipython_extension(shell)
    assert closed == [True]


def test_unloading_where_nothing_was_launched_loads_nothing(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "nb_accelerate.notebook.launch", raising=False)
    nb_accelerate.unload_ipython_extension(shell)
    assert "nb_accelerate.notebook.launch" not in sys.modules


def test_the_launcher_has_what_unloading_calls():
    from nb_accelerate.notebook import launch

    launch.close()  # also where nothing is running
    launch.close()
