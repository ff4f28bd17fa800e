"""Notebooks as jobs: other parameters, and one function on all ranks."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from nb_accelerate.cli import main
from nb_accelerate.cli.notebook import read_parameters, set_parameters
from nb_accelerate.errors import ConfigError

DEFAULTS = "lr = 0.1\nname, epochs = 'a', 3\nsizes: list = [1]"
TRAIN = "def train():\n    import os\n    print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], lr)"
LAUNCH = "from nb_accelerate import notebook_launcher\nnotebook_launcher(train, num_processes=1)"


def notebook(*sources: str) -> nbformat.NotebookNode:
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[0].metadata["tags"] = ["parameters"]
    return nbformat.v4.new_notebook(cells=cells)


def write(folder: Path, *sources: str) -> Path:
    path = folder / "job.ipynb"
    nbformat.write(notebook(*sources), path)
    return path


def sources(book: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in book.cells]


def test_values_are_yaml():
    found = read_parameters(["lr=0.5", "name=b c", "sizes=[1, 2]", "flag=true", "empty=", "odd=a: b: c"])
    assert found == {
        "lr": 0.5,
        "name": "b c",
        "sizes": [1, 2],
        "flag": True,
        "empty": None,
        "odd": "a: b: c",
    }


def test_values_follow_the_defaults_and_replace_those_of_an_earlier_run():
    book = notebook(DEFAULTS, "print(lr)")
    set_parameters(book, {"lr": 0.5})
    set_parameters(book, {"lr": 0.7, "name": "b"})
    assert sources(book) == [DEFAULTS, "# Parameters\nlr = 0.7\nname = 'b'", "print(lr)"]
    nbformat.validate(book)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [(["lr"], "Write -p lr=VALUE"), (["a b=1"], "not a name"), (["1=2"], "not a name")],
)
def test_what_is_no_parameter_is_refused(pairs: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        read_parameters(pairs)


def test_a_name_that_the_notebook_does_not_know_is_refused_with_those_it_knows():
    with pytest.raises(ConfigError, match=r"mean 'epochs'\?"):
        set_parameters(notebook(DEFAULTS), {"epoch": 1})
    book = notebook(DEFAULTS)
    del book.cells[0].metadata["tags"]
    with pytest.raises(ConfigError, match="cells has the tag"):
        set_parameters(book, {"lr": 1})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-p", "nothing=1"], "no parameter 'nothing'"),
    ],
)
def test_flags_that_do_not_fit_the_notebook_are_refused_before_it_runs(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    path = write(tmp_path, DEFAULTS, TRAIN)
    assert main(["launch", str(path), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_notebook_that_fails_is_written_with_its_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, DEFAULTS, "if lr > 0.3:\n    raise ValueError(lr)")
    assert main(["launch", str(path), "-p", "lr=0.5", "--html", "--output-dir", str(tmp_path)]) == 1
    assert "cell 3 failed" in capsys.readouterr().err
    assert {"job.html", "job.executed.ipynb"} <= {file.name for file in tmp_path.iterdir()}
