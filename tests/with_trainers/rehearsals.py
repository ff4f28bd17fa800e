"""Rehearse published trainers: ``python in_accelerates_place.py rehearsals.py FOLDER`` writes FOLDER/found.json.

It has the kind and the text of what was found, and the optimizer steps of rank 0, for each program of `programs.py`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

import torch
from programs import PROGRAMS, import_all

from nb_accelerate.base.topology import Topology
from nb_accelerate.training.rehearsal.rank import rehearse_ranks
from nb_accelerate.training.rehearsal.report import Rehearsal


def main() -> None:
    """Rehearse all programs."""
    torch.set_num_threads(1)
    import_all()
    torch.manual_seed(0)
    # For what trainers make before there is an Accelerator.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    found = {}
    for program in PROGRAMS:
        folder = Path(sys.argv[1], program.__name__)
        for part in ("ranks", "run"):
            (folder / part).mkdir(parents=True)
        topologies = [Topology.of_machine(rank, 2) for rank in range(2)]
        traces = rehearse_ranks(functools.partial(program, str(folder / "run")), topologies, str(folder / "ranks"), 60)
        rehearsal = Rehearsal(tuple(traces), 2, 60)
        steps = len(traces[0].rates[0]) if traces[0].rates else 0
        found[program.__name__] = [(each.kind, each.text) for each in rehearsal.findings], steps
    Path(sys.argv[1], "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
