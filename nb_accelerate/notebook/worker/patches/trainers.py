"""Training with transformers' ``Trainer`` in a rank, as a loop of the progress page: steps, epochs, phases, values.

A Trainer has loaders and an accelerator of accelerate's, which report nothing to the page. It does tell its callbacks
how far it is, so each Trainer of a rank gets one more: its class is added to ``transformers.trainer.DEFAULT_CALLBACKS``
when that module is imported. Steps are those of the optimizer, as ``max_steps`` counts them.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import when_imported
from nb_accelerate.base.progress_page import Phase, here

if TYPE_CHECKING:
    import types

    from nb_accelerate.base.progress_page.page import Loop

# Ends of the names of logged values that the panel has itself, or that are no figures to watch.
_SPEEDS = ("epoch", "_runtime", "_per_second", "total_flos")


def trainers_as_loops() -> None:
    """Have each ``Trainer`` that is made from now on report to the progress page. Without transformers, do nothing."""
    when_imported("transformers.trainer", _add_callback)


def _add_callback(module: types.ModuleType) -> None:
    callbacks = getattr(module, "DEFAULT_CALLBACKS", None)
    if isinstance(callbacks, list):
        callbacks.append(_callback_class())


def _callback_class() -> type:
    base: Any = importlib.import_module("transformers.trainer_callback").TrainerCallback

    class ProgressPageCallback(base):  # type: ignore[misc]
        """Reports to the progress page. Where the loaders are of this package, they do, and it only tells the epochs.

        Each method is called at the event of its name, see ``TrainerCallback``.
        """

        def __init__(self) -> None:
            self._training: Loop | None = None
            self._evaluation: Loop | None = None
            self._evaluated = 0

        def on_train_begin(self, args: Any, state: Any, _control: Any, **others: Any) -> None:
            self._end_loops()  # of a training that was interrupted
            page = here()
            if _reports(others.get("train_dataloader")):
                return
            page.tell_epoch(0, 0)  # not those of a training before
            rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            self._training = page.begin_loop(
                total=state.max_steps, rows=rows, epoch=0, evaluates=False, step=state.global_step, spans_epochs=True
            )
            page.trains()

        def on_epoch_begin(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
            _tell_epoch(state, math.floor(state.epoch or 0.0) + 1)
            self._go_on(control)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._enter(Phase.TRAINING)

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self._enter(Phase.STEP)

        def on_step_end(self, _args: Any, state: Any, control: Any, **_others: Any) -> None:
            if self._training is not None:
                here().step(state.global_step)
            _tell_epoch(state, math.ceil(state.epoch or 0.0))
            self._go_on(control)

        def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_others: Any) -> None:
            self._go_on(control)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self._end_loops()

        def on_prediction_step(self, args: Any, _state: Any, _control: Any, **others: Any) -> None:
            loader = others.get("eval_dataloader")
            if _reports(loader):
                return
            page = here()
            if self._evaluation is None:
                batches = operator.length_hint(loader, -1)
                rows = args.eval_batch_size * args.world_size
                total = batches if batches >= 0 else None
                self._evaluation = page.begin_loop(total=total, rows=rows, epoch=0, evaluates=True)
                self._evaluated = 0
                page.enter(Phase.EVALUATING)
            self._evaluated += 1
            page.step(self._evaluated)

        def on_evaluate(self, _args: Any, _state: Any, control: Any, **_others: Any) -> None:
            self._end_evaluation()
            self._go_on(control)

        on_predict = on_evaluate

        def on_save(self, _args: Any, _state: Any, control: Any, **_others: Any) -> None:
            self._go_on(control)

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            here().log({name: value for name, value in (logs or {}).items() if not name.endswith(_SPEEDS)})

        def _go_on(self, control: Any) -> None:
            """Enter the phase between two steps: a save, for which an interrupt waits, or waiting for data."""
            self._enter(Phase.SAVING if control.should_save else Phase.DATA)

        def _enter(self, phase: Phase) -> None:
            if self._training is not None:
                here().enter(phase)

        def _end_evaluation(self) -> None:
            if self._evaluation is not None:
                here().end_loop(self._evaluation)
                self._evaluation = None

        def _end_loops(self) -> None:
            self._end_evaluation()
            if self._training is not None:
                here().end_loop(self._training)
                self._training = None

    return ProgressPageCallback


def _reports(loader: Any) -> bool:
    """Return whether a loader is one of this package, which reports to the progress page itself."""
    return getattr(loader, "reports_progress", False) is True


def _tell_epoch(state: Any, number: int) -> None:
    """Tell the epoch, unless the Trainer goes on for ``max_steps`` without knowing how many epochs that is."""
    if state.num_train_epochs < sys.maxsize:
        here().tell_epoch(number, state.num_train_epochs)
