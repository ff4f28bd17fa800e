"""Stores are opened once more where PyTorch cannot clone them: before 2.8."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from fixtures.ranks import RunRanks
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from nb_accelerate.process.store_clones import clone_store, prefix_store

if TYPE_CHECKING:
    from pathlib import Path


def opened(kind: str, folder: Path) -> Store:
    if kind == "file":
        return FileStore(str(folder / "store"), -1)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.may_leave("descriptors")  # the server of a TCPStore keeps a pipe for a while after its end
@pytest.mark.parametrize("can_clone", [True, False])
@pytest.mark.parametrize("kind", ["file", "server"])
def test_a_clone_has_the_keys_of_the_store_below_its_prefixes(
    kind: str, can_clone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_clone and hasattr(Store, "clone"):
        for one in (Store, FileStore, TCPStore, PrefixStore):
            if "clone" in vars(one):
                monkeypatch.delattr(one, "clone")
    elif can_clone and not hasattr(Store, "clone"):
        pytest.skip("this PyTorch cannot")
    store = PrefixStore("default_pg", prefix_store("2 ranks, group 0", opened(kind, tmp_path)))
    store.set_timeout(timedelta(seconds=7))
    clone = clone_store(store)
    assert clone is not store
    store.set("a", "1")
    clone.set("b", "2")
    assert (bytes(clone.get("a")), bytes(store.get("b"))) == (b"1", b"2")
    clone.delete_key("a")
    assert not store.check(["a"])


def test_the_store_of_a_group_is_cloned(run_ranks: RunRanks) -> None:
    def clone() -> tuple[bool, bytes]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for one in (Store, FileStore, TCPStore, PrefixStore):
            if "clone" in vars(one):
                delattr(one, "clone")  # in this rank, which ends then
        store = dist.distributed_c10d._get_default_store()
        cloned = clone_store(getattr(store, "_store", store))
        store.set(f"rank {dist.get_rank()}", "here")
        dist.barrier()
        return cloned is not store, bytes(cloned.get(f"rank {1 - dist.get_rank()}"))

    assert run_ranks(clone) == [(True, b"here")] * 2


def test_a_store_with_a_prefix_that_is_not_known_is_used_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in (Store, FileStore, PrefixStore):
        if "clone" in vars(one):
            monkeypatch.delattr(one, "clone")
    store = PrefixStore("of somebody", opened("file", tmp_path))
    assert clone_store(store) is store
