"""Put small faults into a copy of this repository, one at a time, and see whether tests fail.

``.venv/bin/python tests/faults.py [number ...]`` runs the tests that are named with each fault: those of `make test`,
and where they pass the slow ones. A test that fails without the fault as well has caught nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# A file of the package, tests, and what is written in place of what. `|` is the end of a line, before any indentation.
FAULTS = r"""
notebook/ranks/steps.py  ranks/test_requests.py
save=timeouts.save,|),|Step(StepKind.CUT ==> ),|Step(StepKind.CUT
training/precision/fp16.py  training/accelerator/test_loss_scaling.py
is not None and key not in done: ==> is not None:
notebook/ranks/loop.py  ranks pool/test_starting_and_ending.py
self._wake()|if self.ended.is_set(): ==> self._wake()|if False:
training/accelerator/resuming.py  training/checkpoint/test_checkpoints_resumed.py
(epoch + 1) % int(interval.amount) ==> epoch % int(interval.amount)
training/tracking/libraries.py  training/accelerator/test_tracking.py
step=step, **kwargs)|self.tracker.flush() ==> step=step, **kwargs)
notebook/ranks/output/sinks.py  launch/test_output_bytes.py launch/test_output.py
self._file.flush() ==> pass
notebook/display/rows.py  display/test_renderings.py display/test_states.py display/test_one_moment.py
ordered[len(ordered) // 2] ==> ordered[0]
notebook/display/memory.py  display/test_memory.py
1 + shown.index(failed) ==> -1
notebook/launch/sweep.py  launch/test_sweeps.py
in range(len(places)) if ==> in range(1) if
training/data/plan/samplers.py  training/data/test_data_plan.py training/data/test_orders.py
yield from super().__iter__()|self.set_epoch(self.epoch + 1) ==> yield from super().__iter__()
base/records/files.py  display/test_runs_table.py display/test_logged_runs.py
break  # it is being written ==> pass
base/records/kept.py  display/test_runs_table.py display/test_logged_runs.py
if not record.ended: ==> if True:
base/topology/topology.py  training/process/test_process.py training/process/test_other_launchers.py
rank % local_world_size if ==> rank if
base/progress_page/page.py  progress_page
words[layout.STEPS_BEFORE] -= outer.trained ==> pass
cli/launch.py  cli/test_scripts.py cli/test_config.py cli/test_parameters.py
for name, value in of_file.items() if name not in environment ==> for name, value in of_file.items()
cli/launch.py  cli/test_notebook.py cli/test_machines.py
return 128 + signal.SIGINT ==> return 1
notebook/ranks/failing/incidents.py  ranks/test_failures.py launch/test_every_way_to_end.py
incident.peer_lost, incident.when ==> incident.when, incident.peer_lost
notebook/ranks/failing/hang.py  ranks/test_legitimate_waits.py ranks/test_stacks.py
self._note_movement(now)|self._deadlock.moved()|if not ==> self._note_movement(now)|if not
notebook/ranks/failing/errors.py  ranks/test_requests.py
if not _is_same(other, report)] ==> if True]
notebook/ranks/output/merge.py  pool/test_pure_parts.py
queue.shown.clear() ==> pass
notebook/ranks/input_requests.py  ranks/test_input_requests.py
if rank == self._rank:|self._rank, self._talks = -1, False ==> if False:|self._rank, self._talks = -1, False
notebook/launch/plan.py  launch/test_plan.py
names = tuple(names[number] for ==> names = tuple(str(number) for
notebook/launch/rendezvous_store.py  launch/test_machines.py
if ended != DONE: ==> if False:
notebook/remote/sender.py  remote/test_frames.py remote/test_streams.py
self._queue.appendleft(queued._replace( ==> self._queue.append(queued._replace(
notebook/remote/link.py  remote/test_streams.py remote/test_frames.py remote/test_launches.py
self.ahead = min(self.ahead, time ==> self.ahead = max(0.0, time
notebook/pool/plan.py  pool/test_pure_parts.py pool/test_advice.py
self.deleted[rank] -= trained ==> pass
notebook/pool/names.py  pool/test_names.py pool/test_names_fuzz.py
reads, stores = _own_names(code)|inner ==> reads, stores = _own_names(code)|stores = set()|inner
notebook/worker/interrupt.py  launch/test_interrupt_gate.py
os.getpid() != self._pid or not ==> not
notebook/display/findings/stuck.py  display/test_states.py
stalled.difference(waiting) ==> stalled
training/checkpoint/fitting.py  training/checkpoint/test_checkpoints_resumed.py
and position * before % now == 0: ==> and True:
training/optim/accumulation.py  training/accelerator/test_training_step.py
if self.sync_with_dataloader and ==> if
training/optim/scheduler.py  training/accelerator/test_training_step.py
for optimizer in self.optimizers:|if ==> for optimizer in self.optimizers[:1]:|if
training/checkpoint/publishing.py  training/checkpoint/test_checkpoint_publishing.py
in reversed(range(ranks)): ==> in range(ranks):
training/checkpoint/numbered.py  training/checkpoint/test_checkpoint_folders.py
(folder in whole or numbers[folder] < newest) ==> True
training/comm/operations.py  training/process/test_collectives.py
device="cpu")).amax(0) ==> device="cpu"))[-1]
training/checkpoint/checksums.py  training/checkpoint/test_checkpoint_damage.py
block.result() != crc32 ==> False
training/bigmodel/device_map.py  training/bigmodel/test_device_maps.py
self._limits[device] - self._rooms.get(device, 0) ==> self._limits[device]
training/convert/rows.py  pool/test_converted_cells.py pool/test_plain_training.py
else (end - first) / rows ==> else 1 / collectives.world_size
training/accelerator/losses.py  display/test_utilisation.py
_last.loss, _last.page = None, self._page ==> _last.page = self._page
training/data/loops.py  training/data/test_loops_in_loops.py
self._loops[index:] = [*left, loop, *moving] ==> self._loops[index:] = [loop, *left, *moving]
"""

MARKS = {"fast": "not slow and not browser", "slow": "slow or browser"}


def main(numbers: list[int]) -> None:
    """Try these faults, or all, and print what has caught each."""
    rows = read_rows()
    caught = {"fast": 0, "slow": 0, "NOT CAUGHT": 0}
    with tempfile.TemporaryDirectory() as folder:
        copy_files = f"git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t {folder}"
        subprocess.run(copy_files, shell=True, cwd=Path(__file__).parents[1], check=True)
        for number in numbers or range(1, len(rows) + 1):
            name, old, new, tests = rows[number - 1]
            how, by = _try(Path(folder), name, old, new, tests=tests)
            caught[how] += 1
            print(f"{number:2} {how:<10} {name}: {by}", flush=True)
    print(", ".join(f"{how}: {number}" for how, number in caught.items()))


def read_rows() -> list[tuple[str, str, str, list[str]]]:
    """Return of each fault the file, what stands there, what is written in its place, and the tests."""
    lines = FAULTS.strip().splitlines()
    rows = []
    for files, edit in zip(lines[::2], lines[1::2], strict=True):
        (name, *tests), (old, new) = files.split(), edit.split(" ==> ")
        rows.append((name, old, new, [f"tests/{test}" for test in tests]))
    return rows


def places(name: str, old: str, copy: Path = Path(__file__).parents[1]) -> list[str]:
    """Return the texts in a file of the package that are what a fault replaces: it is to be one."""
    text = (copy / "nb_accelerate" / name).read_text(encoding="utf-8")
    return re.findall(r"\n *".join(map(re.escape, old.split("|"))), text)


def _try(copy: Path, name: str, old: str, new: str, *, tests: list[str]) -> tuple[str, str]:
    """Return whether a fault is caught, and by which test."""
    file = copy / "nb_accelerate" / name
    right = file.read_text(encoding="utf-8")
    found = places(name, old, copy)
    if len(found) != 1:
        raise SystemExit(f"{name} has {old!r} {len(found)} times, and not once")
    ends = iter(re.findall(r"\n *", found[0]))
    text = re.sub(r"\|", lambda _: next(ends, "\n"), new)
    for how, marks in MARKS.items():
        file.write_text(right.replace(found[0], text), encoding="utf-8")
        failed = _failed(copy, chosen := ["-x", "-m", marks, *tests])
        file.write_text(right, encoding="utf-8")
        if failed:
            also = _failed(copy, chosen if failed.startswith("exit") else [failed])
            return ("NOT CAUGHT", f"{also} fails without it too") if also else (how, failed)
    return "NOT CAUGHT", " ".join(tests)


def _failed(copy: Path, arguments: list[str]) -> str:
    """Run tests in the copy, whose ranks and kernels import it too, and return the first that fails; "" for none."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(copy)}
    run = subprocess.run(command, cwd=copy, env=environ, capture_output=True, text=True, check=False)
    if run.returncode in (0, 5):
        return ""
    match = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", run.stdout, re.MULTILINE)
    return match[1] if match else f"exit code {run.returncode} of pytest"


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
