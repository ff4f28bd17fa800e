"""transformers' Trainer in a launched function: its progress page has steps, epochs, phases and values of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

ROWS = 20


class Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Rows without an end, so that nobody knows how many epochs ``max_steps`` is."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield make_row(0)


def make_row(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([float(number), 1.0]), "labels": torch.tensor([1.0])}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


def train(folder: str) -> list[list[tuple[Any, ...]]]:
    """Train three times; return for each what the page of this rank said at the events of the Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from nb_accelerate.base.progress_page import here
    from nb_accelerate.base.progress_page.sample import read

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Notes the page at each event; Trainers call it after those callbacks that they have by themselves."""

        def __init__(self) -> None:
            self.seen: list[tuple[Any, ...]] = []

        def note(self, event: str) -> None:
            one = read(here().buffer)  # what the kernel maps
            self.seen.append((event, one.step, one.total, one.epoch, one.epochs, one.phase.name, one.spans_epochs))

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.note("begins")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.note("step")

        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            self.note("predicts")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            one = read(here().buffer)
            self.seen.append(("end", one.steps, one.in_loop, "loss" in one.scalars, "eval_runtime" in one.scalars))

    def run(rows: Any, *, resume: str | None = None, **options: Any) -> list[tuple[Any, ...]]:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=5, logging_steps=1,
            report_to=[], disable_tqdm=True, **options,
        )  # fmt: skip
        recorder = Recorder()
        held_out = [make_row(number) for number in range(ROWS)]
        trainer = Trainer(Model(), arguments, train_dataset=rows, eval_dataset=held_out, callbacks=[recorder])
        trainer.train(resume_from_checkpoint=resume)
        return recorder.seen

    rows = [make_row(number) for number in range(ROWS)]
    twice = {"num_train_epochs": 2, "gradient_accumulation_steps": 2}
    return [
        run(rows, **twice, eval_strategy="epoch", save_steps=3),
        run(rows, **twice, save_strategy="no", resume=f"{folder}/checkpoint-3"),
        run(Endless(), max_steps=4, save_strategy="no"),
    ]


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_a_trainer_tells_the_page_how_far_the_whole_run_is(run_ranks, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    # 20 rows, 2 ranks, batches of 2, two for a step: 5 batches and 3 steps an epoch.
    for whole, resumed, endless in run_ranks(train, str(tmp_path), deadline=90):
        steps = [one for one in whole if one[0] == "step"]
        assert [one[1:5] for one in steps] == [(done, 6, 1 if done <= 3 else 2, 2) for done in range(1, 7)]
        assert all(spans for *_, spans in steps)
        assert {one[5] for one in whole if one[0] == "begins"} == {"TRAINING"}
        predicts = [one for one in whole if one[0] == "predicts"]
        assert [one[1:3] for one in predicts] == [(1, 2), (2, 2)] * 2, "20 rows, 2 ranks, batches of 5"
        assert {one[5:] for one in predicts} == {("EVALUATING", False)}
        assert whole[-1] == ("end", 6, False, True, False)

        assert [one[1:5] for one in resumed if one[0] == "step"] == [(done, 6, 2, 2) for done in (4, 5, 6)]
        assert [one[1:5] for one in endless if one[0] == "step"] == [(done, 4, 0, 0) for done in (1, 2, 3, 4)]
