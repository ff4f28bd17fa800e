"""The random numbers of ranks are those of the notebook, from when they start and when it is seeded again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel

pytestmark = pytest.mark.slow

DRAW = "random.random(), numpy.random.rand(), torch.rand(()).item()"
ON_RANKS = f"%%distributed --out drawn\nimport random, numpy, torch\n{DRAW}"
SEED = "torch.manual_seed({0}); numpy.random.seed({0}); random.seed({0})"


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.run("%load_ext nb_accelerate\nimport random, numpy, torch").ok()
    shared_kernel.run(SEED.format(1)).ok()
    shared_kernel.run(ON_RANKS).ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def drew_alike(notebook: Kernel) -> bool:
    """Draw in the notebook what both ranks have drawn, if it was seeded before."""
    return notebook.run(f"drawn[0] == drawn[1] == ({DRAW})").ok().value == "True"


def test_ranks_begin_with_the_seeds_of_the_notebook(notebook: Kernel):
    assert drew_alike(notebook)


def test_a_seed_that_is_set_later_reaches_them_also_the_same_one_again(notebook: Kernel):
    for _ in range(2):
        notebook.run(SEED.format(2)).ok()
        notebook.run(ON_RANKS).ok()
        assert drew_alike(notebook)


def test_what_the_notebook_draws_does_not_change_what_they_draw(notebook: Kernel):
    notebook.run("%%distributed\nfrom nb_accelerate.utils import set_seed\nset_seed(5, device_specific=True)").ok()
    notebook.run("random.random()").ok()
    notebook.run(ON_RANKS).ok()
    assert notebook.run("len({*drawn[0], *drawn[1]})").ok().value == "6"
    notebook.run(SEED.format(3)).ok()
    notebook.run(ON_RANKS).ok()
    assert drew_alike(notebook)


@pytest.mark.may_leave("processes")  # the new rank, which the fixture ends
def test_a_rank_in_the_place_of_another_draws_what_the_others_draw(notebook: Kernel):
    notebook.run("%%distributed\nrandom.random(), torch.rand(3);").ok()
    notebook.run("%distributed restart 1").ok()
    notebook.run(ON_RANKS).ok()
    assert notebook.run("drawn[0] == drawn[1]").ok().value == "True"


def test_ranks_draw_alike_if_the_notebook_has_not_imported_numpy(new_kernel: Kernel):
    new_kernel.run("%load_ext nb_accelerate\nimport sys, random").ok()
    new_kernel.run("%%distributed --out drawn\nimport random, numpy, torch\n" + DRAW).ok()
    assert new_kernel.run("drawn[0] == drawn[1], 'numpy' in sys.modules").ok().value == "(True, False)"
    new_kernel.run("%unload_ext nb_accelerate").ok()
