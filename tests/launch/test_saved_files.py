"""A file that every rank saves with ``torch.save`` is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def test_a_file_is_never_there_in_part(run_ranks: RunRanks, tmp_path: Path):
    path = tmp_path / "best.pt"
    torch.save({}, path)
    path.chmod(0o640)
    link = tmp_path / "link.pt"
    link.symlink_to(path)

    class Fails:
        def __reduce__(self) -> str:
            raise RuntimeError("it is not saved")

    def fail() -> str:
        try:
            torch.save([torch.ones(1000), Fails()], link)
        except RuntimeError as error:
            torch.save({"saved": "afterwards"}, link)
            return str(error)
        return ""

    def fail_first() -> None:
        torch.save([torch.ones(1000), Fails()], link)

    with pytest.raises(RuntimeError, match="it is not saved"):
        run_ranks(fail_first)
    assert torch.load(path) == {}
    assert run_ranks(fail) == ["it is not saved"] * 2
    assert torch.load(path) == {"saved": "afterwards"}
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "link.pt"]
