from __future__ import annotations

from pathlib import Path

import pytest
from structure.layers import BASE, NOTEBOOK, TRAINING, Room, broken_rules, circles, read_picture

ROOT = Path(__file__).parents[2]

PICTURE = """The training half, the base and the notebook half:

```text
level  training half    base           notebook half
 3                      __init__  cli
 2     trainer                         launch
 1     maths                           wire
 0                      errors
```

More text.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small package that keeps the rules."""
    package = tmp_path / "nb_accelerate"
    package.mkdir()
    (tmp_path / "CONTRIBUTING.md").write_text(PICTURE)
    (package / "__init__.py").write_text("")
    for name in ("cli", "trainer", "maths", "launch", "wire", "errors"):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text("")
    (package / "maths" / "sums.py").write_text("import torch\nfrom nb_accelerate.errors import Oops\n")
    (package / "trainer" / "loop.py").write_text("from nb_accelerate.maths.sums import add\n")
    (package / "wire" / "send.py").write_text("def send():\n    import torch\n")
    (package / "launch" / "start.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from nb_accelerate import errors, wire\n"
        "if TYPE_CHECKING:\n"
        "    import torch\n"
    )
    return tmp_path


def test_the_package_keeps_the_rules_of_its_picture():
    assert broken_rules(ROOT) == []


def test_the_picture_is_read_by_row_and_column(tree: Path):
    assert read_picture(tree) == {
        "__init__": Room(3, BASE),
        "cli": Room(3, BASE),
        "trainer": Room(2, TRAINING),
        "launch": Room(2, NOTEBOOK),
        "maths": Room(1, TRAINING),
        "wire": Room(1, NOTEBOOK),
        "errors": Room(0, BASE),
    }


def test_a_page_without_a_picture_is_refused(tree: Path):
    (tree / "CONTRIBUTING.md").write_text("Nothing drawn here.")
    with pytest.raises(AssertionError, match="no picture"):
        read_picture(tree)


def test_a_tree_that_keeps_the_rules_passes(tree: Path):
    assert broken_rules(tree) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("maths/sums.py", "from nb_accelerate.trainer import loop", "maths (level 1) imports trainer (level 2)"),
        ("maths/sums.py", "from ..trainer import loop", "maths (level 1) imports trainer (level 2)"),
        ("maths/sums.py", "import nb_accelerate.trainer.loop", "maths (level 1) imports trainer (level 2)"),
        ("maths/sums.py", "from nb_accelerate import trainer", "maths (level 1) imports trainer (level 2)"),
        ("maths/sums.py", "from nb_accelerate import Trainer", "maths (level 1) imports __init__ (level 3)"),
        (
            "maths/sums.py",
            "def late():\n    from nb_accelerate import trainer",
            "maths (level 1) imports trainer (level 2)",
        ),
        ("trainer/loop.py", "import nb_accelerate.notebook.launch", "trainer (level 2) imports launch (level 2)"),
        ("launch/start.py", "import nb_accelerate.maths", "launch (notebook half) imports maths (training half)"),
        ("trainer/loop.py", "import nb_accelerate.wire", "trainer (training half) imports wire (notebook half)"),
        ("wire/send.py", "import torch", "wire (notebook half) imports torch when it is imported"),
        ("wire/send.py", "import torch.cuda", "wire (notebook half) imports torch.cuda when it is imported"),
        (
            "wire/send.py",
            "try:\n    from torch import nn\nexcept ImportError:\n    pass",
            "wire (notebook half) imports torch.nn when it is imported",
        ),
        ("errors/oops.py", "class A:\n    import torch", "errors (base) imports torch when it is imported"),
        ("wire/utils.py", "", "the name says nothing about the subject"),
        ("pool/pool.py", "", "pool is not in the picture"),
        ("pool.py", "", "pool.py is not in the picture"),
        ("training/pool.py", "", "pool is not in the picture"),
        ("notebook/maths/sums.py", "", "maths is drawn in the training half"),
        ("training/maths/sums.py", "from nb_accelerate.notebook.wire import send", "imports wire (notebook half)"),
        ("training/maths/sums.py", "import nb_accelerate.training.trainer.loop", "imports trainer (level 2)"),
    ],
)
def test_a_broken_rule_is_reported(tree: Path, file: str, line: str, fault: str):
    path = tree / "nb_accelerate" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert any(fault in found for found in broken_rules(tree)), broken_rules(tree)


def test_a_room_that_is_drawn_and_does_not_exist_is_reported(tree: Path):
    (tree / "nb_accelerate" / "errors" / "__init__.py").unlink()
    assert "errors is in the picture, but does not exist" in broken_rules(tree)


def test_no_modules_import_each_other():
    assert circles(ROOT) == []


def test_modules_that_import_each_other_are_reported(tree: Path):
    assert circles(tree) == []
    (tree / "nb_accelerate" / "maths" / "tables.py").write_text("def late():\n    from .sums import add\n")
    sums = tree / "nb_accelerate" / "maths" / "sums.py"
    for line in (
        "from .tables import late\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .tables import Row\n",
    ):
        sums.write_text(line)
        assert circles(tree) == [{"nb_accelerate.maths.sums", "nb_accelerate.maths.tables"}]
