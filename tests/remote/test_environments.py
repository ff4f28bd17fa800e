"""What keeps ranks from running on a machine with other versions, and what users are told to write."""

from __future__ import annotations

import pytest

from nb_accelerate.notebook.launch.cluster import Differences, compare

HERE = {"python": "3.11.9", "torch": "2.13.0+cpu", "package": "0.2.0"}


def found(here: dict[str, str], there: dict[str, str]) -> Differences:
    return compare(HERE | here, HERE | there, python="~/env/bin/python")


@pytest.mark.parametrize("there", [{}, {"torch": "2.13.0+cu129"}, {"python": "3.11.2"}])
def test_what_does_not_matter_is_not_said(there: dict[str, str]) -> None:
    assert found({}, there) == ((), ())


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ({}, {"python": "3.12.1"}, r"it has Python 3.12.1, and this notebook 3.11.9: .*remote_python='python3.11'"),
        (
            {},
            {"package": "0.1.0"},
            r"it has nb_accelerate 0.1.0, and this notebook 0.2.0. Install this notebook's version there",
        ),
        ({}, {"torch": ""}, r"^it has no PyTorch. Write there: ~/env/bin/python -m pip install torch==2.13.0$"),
        ({"torch": ""}, {}, r"this notebook has none.* Write here: %pip install torch==2.13.0$"),
        ({"torch": ""}, {"torch": ""}, r"no PyTorch, nor has this notebook.* Write there: .* pip install torch$"),
        ({}, {"torch": "2.12.1"}, r"^it has PyTorch 2.12.1, and this notebook 2.13.0\+cpu. .* install torch==2.13.0$"),
    ],
)
def test_an_obstacle_is_named_with_what_to_write(here: dict[str, str], there: dict[str, str], said: str) -> None:
    (obstacle,), warnings = found(here, there)
    assert pytest.RaisesExc(Exception, match=said).matches(Exception(obstacle))
    assert warnings == ()


def test_another_version_with_the_same_first_numbers_is_a_warning() -> None:
    obstacles, (warning,) = found({}, {"torch": "2.13.1"})
    assert obstacles == ()
    assert warning.startswith("it has PyTorch 2.13.1")
