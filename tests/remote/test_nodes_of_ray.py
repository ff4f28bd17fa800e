"""Which nodes of a cluster of Ray ranks are on, and what they reserve there."""

from __future__ import annotations

import pytest

from nb_accelerate.notebook.launch.engines.ray_driver import CannotPlaceError, Node, chosen

HEAD, OTHER = (
    Node(name=name, address=f"10.0.0.{name[-1]}", is_head=name == "n1", cpus=2, gpus=0) for name in ("n1", "n2")
)
BIG = Node(name="n3", address="10.0.0.3", is_head=False, cpus=8, gpus=4)


@pytest.mark.parametrize(
    ("nodes", "hosts", "num_ranks", "found"),
    [
        ([HEAD, OTHER], [], None, [("n1", None), ("n2", None)]),
        ([HEAD, OTHER], [], 1, [("n1", 1)]),
        ([HEAD, OTHER], [], 3, [("n1", 2), ("n2", 1)]),
        ([HEAD, OTHER, BIG], [], 3, [("n3", 3)]),
        ([HEAD, OTHER], [("10.0.0.2", None)], 1, [("10.0.0.2", 1)]),
        ([HEAD, OTHER], [("n1", None), ("n2", None)], 2, [("n1", 1), ("n2", 1)]),
        ([HEAD, OTHER], [("n1", 1), ("n2", None)], 3, [("n1", 1), ("n2", 2)]),
        ([HEAD, HEAD._replace(address="10.0.0.9")], [], None, [("10.0.0.1", None), ("10.0.0.9", None)]),
    ],
)
def test_ranks_are_on_the_first_nodes_as_far_as_their_number_goes(nodes, hosts, num_ranks, found):
    assert [(name, number) for _, name, number in chosen(nodes, hosts, num_ranks)] == found


def test_what_the_cluster_does_not_have_is_named():
    with pytest.raises(CannotPlaceError, match=r"'n9'.* n1 \(10\.0\.0\.1\), n2 "):
        chosen([HEAD, OTHER], [("n1", None), ("n9", None)], None)
    with pytest.raises(CannotPlaceError, match=r"4 CPUs.* num_processes=4"):
        chosen([HEAD, OTHER], [], 5)
    with pytest.raises(CannotPlaceError, match=r"4 GPUs.* num_processes=4"):
        chosen([HEAD, BIG], [], 5)


def test_a_rank_reserves_a_gpu_where_there_is_one_and_else_a_core():
    own = {"node:10.0.0.3": 0.001}
    assert BIG.bundle("n3", 2) == {**own, "GPU": 2}
    assert BIG.bundle("n3", None) == {**own, "GPU": 4}
    assert BIG.bundle("n3", 0) == own
    assert OTHER.bundle("n2", 1) == {"node:10.0.0.2": 0.001, "CPU": 1}
    with pytest.raises(CannotPlaceError, match=r"2 CPUs .*hosts=\['n2:2'\].* --num-cpus"):
        OTHER.bundle("n2", 3)
