"""Checkpoints that are damaged or do not fit: refused with the file named, and nothing is half loaded."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn
from training.checkpoint.test_checkpoints import Counter

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint.checksums import FileRecord, Verification, record_files
from nb_accelerate.training.process import context


class Run:
    """Something of everything that a checkpoint has, trained for some steps."""

    def __init__(self, width: int = 8, steps: int = 2, package: Any = None) -> None:
        import nb_accelerate

        package = package or nb_accelerate
        options = package.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
        self.accelerator = package.Accelerator(cpu=True, dataloader_config=options)
        torch.manual_seed(steps + self.accelerator.process_index)
        models = [nn.Linear(3, width), nn.Linear(width, 1)]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, gamma=0.5)
        loader = torch.utils.data.DataLoader(torch.arange(48.0).view(16, 3), batch_size=2)
        objects = self.accelerator.prepare(*models, *optimizers, scheduler, loader)
        self.models, self.optimizers, self.scheduler, self.loader = objects[:2], objects[2:4], objects[4], objects[5]
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        if package is nb_accelerate:
            self.accelerator.register_save_state_pre_hook(self._write_own)
        batches = iter(self.loader)
        for self.counter.count in range(steps):
            self.accelerator.backward(self.models[1](self.models[0](next(batches))).sum())
            for optimizer in self.optimizers:
                optimizer.step()
            self.scheduler.step()

    def _write_own(self, _models: Any, _weights: Any, where: str) -> None:
        if self.accelerator.is_main_process:
            (Path(where) / "mine").mkdir()
            (Path(where) / "mine" / "own.txt").write_text(f"{self.counter.count} and more")

    def look(self) -> str:
        """Return all that loading could change, as text."""
        things = [*self.models, *self.optimizers, self.scheduler, self.counter, self.loader]
        return repr([thing.state_dict() for thing in things] + [torch.get_rng_state().tolist()[:50]])


KINDS = ("cut off", "flipped bit", "missing", "another run's", "other shapes", "empty")


def _damage(kind: str, name: str, where: Path, others: dict[str, Path]) -> None:
    path = where / name
    content = path.read_bytes()
    if kind == "cut off":
        path.write_bytes(content[: len(content) * 2 // 3])
    elif kind == "flipped bit":
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    elif kind == "missing":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        shutil.copy(others[kind] / name, path)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.limit(90)
def test_every_damage_of_every_file_is_refused_and_nothing_is_half_loaded(
    run_ranks: RunRanks, tmp_path: Path, ranks: int
):
    def load_all(where: str) -> list[str]:
        from training.checkpoint.test_checkpoint_damage import KINDS, Run, _damage

        root = Path(where)
        others = {"another run's": root / "another", "other shapes": root / "wide"}
        Run(steps=3).accelerator.save_state(others["another run's"])
        Run(width=5, steps=3).accelerator.save_state(others["other shapes"])
        saved = Run(steps=2)
        saved.accelerator.save_state(root / "good")
        expected = saved.look()
        run = Run(steps=4)
        before = run.look()
        wait = run.accelerator.wait_for_everyone
        is_main = run.accelerator.is_main_process
        wrong = []
        names = sorted(str(path.relative_to(root / "good")) for path in (root / "good").rglob("*") if path.is_file())
        wrong += [] if len(names) == 9 + 2 * run.accelerator.num_processes - 1 else [f"files: {names}"]
        for number, (name, kind) in enumerate((name, kind) for name in names for kind in KINDS):
            bad = root / f"{number}"
            if is_main:
                shutil.copytree(root / "good", bad)
                _damage(kind, name, bad, others)
            wait()
            try:
                run.accelerator.load_state(bad)
            except CheckpointError as error:
                text = str(error)
                wrong += [f"{kind} {name}: {text}"] if str(bad / name) not in text or "weights_only" in text else []
            else:
                wrong.append(f"{kind} {name}: loaded")
            wrong += [f"{kind} {name}: changed something"] if run.look() != before else []
        wide = others["other shapes"]
        try:
            run.accelerator.load_state(wide)
        except CheckpointError as error:
            wrong += [] if str(wide / "model.safetensors") in str(error) else [str(error)]
        else:
            wrong.append("a checkpoint of other shapes: loaded")
        wrong += ["a checkpoint of other shapes: changed something"] if run.look() != before else []
        run.accelerator.load_state(root / "good")
        return [*wrong, *([] if run.look() == expected else ["the good one is not what was saved"])]

    for wrong in run_ranks(load_all, str(tmp_path), world_size=ranks, deadline=80.0):
        assert not wrong, "\n".join(wrong)


def test_checksums_notice_every_change(tmp_path: Path):
    random_ = random.Random(5)
    content = random_.randbytes((1 << 24) + 70_001)
    file = tmp_path / "below" / "written"
    file.parent.mkdir()
    file.write_bytes(content)
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(file)
    records = record_files(tmp_path)
    assert records == {
        "below/written": FileRecord(len(content), (zlib.crc32(content[: 1 << 24]), zlib.crc32(content[1 << 24 :]))),
        "empty": FileRecord(0, ()),
    }
    assert _compared(tmp_path, records) == []
    for place in (0, 12_345, (1 << 24) - 1, 1 << 24, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1 << random_.randrange(8)
        file.write_bytes(changed)
        (told,) = _compared(tmp_path, records)
        assert "written is not as" in told, place
        halves = [_compared(tmp_path, records, rank=rank, num_ranks=2) for rank in (0, 1)]
        assert sum(map(len, halves)) == 1  # each rank compares a part


def _compared(folder: Path, records: dict[str, FileRecord], **ranks: int) -> list[str]:
    with Verification(folder, records, **ranks) as compared:
        return compared.result()


@pytest.mark.parametrize("kind", ["cut off", "missing", "other shapes", "empty"])
def test_damage_of_files_of_accelerate_is_refused_before_anything_changes(tmp_path: Path, kind: str):
    import accelerate

    for name, options in {"good": {}, "wide": {"width": 5, "steps": 3}}.items():
        Run(**options, package=accelerate).accelerator.save_state(str(tmp_path / name))
    run = Run(steps=4)
    before = run.look()
    names = sorted(path.name for path in (tmp_path / "good").iterdir())
    assert len(names) == 8
    for name in names:
        if kind in ("missing", "other shapes") and name.startswith(("random", "dl_state", "custom", "scheduler")):
            continue  # nothing has to be there, or has a shape
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        _damage(kind, name, tmp_path / "bad", {"other shapes": tmp_path / "wide"})
        with pytest.raises(CheckpointError, match=name) as caught:
            run.accelerator.load_state(tmp_path / "bad")
        assert "weights_only" not in str(caught.value)
        assert run.look() == before, name
        shutil.rmtree(tmp_path / "bad")
    run.accelerator.load_state(tmp_path / "good")
    assert run.look() != before


def _prepared(optimizer: Any, scheduler: Any = None, package: Any = None, **options: Any) -> tuple[Any, Any]:
    context.reset()
    accelerator = (package or __import__("nb_accelerate")).Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    made = optimizer(model.parameters(), lr=0.1, **options)
    objects = [model, made] + ([] if scheduler is None else [scheduler(made)])
    objects = list(accelerator.prepare(*objects))
    accelerator.backward(objects[0](torch.ones(1, 2)).sum())
    objects[1].step()
    return accelerator, objects


@pytest.mark.parametrize("saved_by", ["nb_accelerate", "accelerate"])
def test_the_state_of_another_optimizer_or_scheduler_is_refused(tmp_path: Path, saved_by: str):
    package = __import__(saved_by)
    step, cosine = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR
    accelerator, _ = _prepared(torch.optim.SGD, lambda one: step(one, 3), package)
    accelerator.save_state(str(tmp_path))
    accelerator, (model, optimizer, _) = _prepared(torch.optim.AdamW, lambda one: step(one, 3))
    before = repr([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(CheckpointError, match=r"optimizer\.bin .*(SGD|lacks .*betas)"):
        accelerator.load_state(tmp_path)
    assert repr([model.state_dict(), optimizer.state_dict()]) == before
    accelerator, _ = _prepared(torch.optim.SGD, lambda one: cosine(one, 3))
    with pytest.raises(CheckpointError, match=r"scheduler\.bin .*(StepLR|lacks T_max)"):
        accelerator.load_state(tmp_path)


def test_options_that_older_versions_of_torch_did_not_save_are_not_missed(tmp_path: Path):
    import accelerate

    accelerator, (_, optimizer) = _prepared(torch.optim.AdamW, package=accelerate)
    accelerator.save_state(str(tmp_path))
    state = torch.load(tmp_path / "optimizer.bin")
    for name in ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
        state["param_groups"][0].pop(name, None)
    torch.save(state, tmp_path / "optimizer.bin")
    accelerator, (_, optimizer) = _prepared(torch.optim.AdamW)
    accelerator.load_state(tmp_path)
    assert optimizer.param_groups[0]["fused"] is None


def test_what_nobody_takes_is_refused_where_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    accelerator, (model, *_) = _prepared(torch.optim.SGD, lambda one: torch.optim.lr_scheduler.StepLR(one, 3))
    accelerator.save_state(tmp_path)
    expected = model.weight.detach().clone()
    accelerator, (model, _) = _prepared(torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"scheduler\.bin.*strict=False"):
        accelerator.load_state(tmp_path)
    assert not torch.equal(model.weight, expected)
    accelerator.load_state(tmp_path, strict=False)
    assert torch.equal(model.weight, expected)
    context.reset()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    caplog.clear()
    accelerator.load_state(tmp_path)  # to evaluate
    assert torch.equal(model.weight, expected)
    assert "optimizer.bin, scheduler.bin" in caplog.text


def _refuse(state: Any) -> None:
    raise KeyError("I do not like it")


def test_an_object_that_refuses_its_state_leaves_everything_as_it_was(run_ranks: RunRanks, tmp_path: Path):
    def load(where: str) -> Any:
        from training.checkpoint.test_checkpoint_damage import Run, _refuse
        from training.checkpoint.test_checkpoints import Counter

        run = Run(steps=2)
        second = Counter()
        run.accelerator.register_for_checkpointing(second)
        run.accelerator.save_state(where)
        run = Run(steps=3)
        second = Counter()
        run.accelerator.register_for_checkpointing(second)
        if run.accelerator.process_index == 1:
            second.load_state_dict = _refuse  # type: ignore[method-assign]
        before = run.look()
        try:
            run.accelerator.load_state(where)
        except CheckpointError as error:
            return str(error), run.look() == before

    for text, is_same in run_ranks(load, str(tmp_path)):
        assert "refused by Counter.load_state_dict: KeyError" in text
        assert is_same


# --- Saving that fails ------------------------------------------------------------------------------------------


def test_a_rank_that_fails_while_saving_fails_all_and_training_goes_on(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> Any:
        import resource

        from training.checkpoint.test_checkpoint_damage import Run

        from nb_accelerate.training.checkpoint import state
        from nb_accelerate.training.checkpoint.manifest import Manifest

        run = Run()
        run.accelerator.save_state(where)
        expected = run.look()
        told = []
        rank = run.accelerator.process_index

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("on purpose")

        for failing in (0, 1):
            if rank == failing:
                handle = run.accelerator.register_save_state_pre_hook(fail)
            try:
                run.accelerator.save_state(where)
            except (CheckpointError, ZeroDivisionError) as error:
                told.append(str(error))
            if rank == failing:
                handle.remove()

        # A disk that is full at one file after the other. Only what is written to the checkpoint meets the limit: the
        # store of the process group is a file too.
        def limited(write: Callable[..., Any], limit: int) -> Callable[..., Any]:
            def write_with_limit(*args: Any, **kwargs: Any) -> Any:
                before = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
                try:
                    return write(*args, **kwargs)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, before)

            return write_with_limit

        for limit in (0, 10, 300, 900, 2000, 4000):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(state, "write", limited(state.write, limit))
                    patch.setattr(Manifest, "write", limited(Manifest.write, limit))
                try:
                    run.accelerator.save_state(where)
                except CheckpointError as error:
                    told.append(str(error))
        other = Run(steps=3)
        other.accelerator.load_state(where)
        is_same = other.look() == expected
        run.accelerator.save_state(where)
        return told, is_same, sorted(os.listdir(Path(where).parent))

    first, second = run_ranks(save, str(tmp_path / "state"))
    assert first[1:] == second[1:] == (True, ["state"])
    assert first[0][:2] == ["on purpose", "on rank 1: ZeroDivisionError: on purpose"]
    assert second[0][:2] == ["on rank 0: ZeroDivisionError: on purpose", "on purpose"]
    assert len(first[0]) == len(second[0]) == 8
    for own, others in zip(first[0][2:], second[0][2:], strict=True):
        assert own in others
        assert "could not be written" in own or "File too large" in own
