"""The checkpoints in a folder, as a table. Nothing here needs torch: a notebook asks that trains elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.table import Table
from nb_accelerate.base.words import size
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.checkpoint.checksums import Verification
from nb_accelerate.training.checkpoint.manifest import examine
from nb_accelerate.training.checkpoint.names import MANIFEST_NAME
from nb_accelerate.training.checkpoint.publishing import published

if TYPE_CHECKING:
    import os

_COLUMNS = ("checkpoint", "step", "saved after", "saved at", "size", "logged last", "whole")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What is known about a checkpoint.

    Attributes:
        folder: where it is.
        step: batches that each rank has trained with since the beginning, with the one in whose lines it
            was saved; None if nobody has counted, as outside of `Accelerator.resumable`.
        epoch: how many epochs of the first loader were over, and how many batches of the next one were read; None if
            there was no loader. A table shows ``(2, 22)`` as ``epoch 3, batch 22``.
        saved_at: when; None if that is not known.
        num_bytes: of its files.
        metrics: values that were logged last, by name.
        damage: a sentence for each file that is missing or damaged; none if it is whole.
    """

    folder: Path
    step: int | None
    epoch: tuple[int, int] | None
    saved_at: datetime | None
    num_bytes: int
    metrics: dict[str, float]
    damage: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or damaged."""
        return not self.damage

    def cells(self) -> tuple[str, ...]:
        """Return what a table shows of it, in the order of its columns; a dash for a step that is not known."""
        losses = [name for name in self.metrics if "loss" in name]
        shown = "loss" if "loss" in losses else next(iter(losses or self.metrics), None)
        after = ""
        if self.epoch is not None:  # counted from 1 as the panel does; of a whole epoch its number
            whole, batches = self.epoch
            after = f"epoch {whole + 1}, batch {batches}" if batches else f"epoch {whole}" if whole else "the beginning"
        return (
            self.folder.name,
            "-" if self.step is None else f"{self.step:,}",
            after,
            "" if self.saved_at is None else f"{self.saved_at.astimezone():%Y-%m-%d %H:%M:%S}",
            size(self.num_bytes),
            "" if shown is None else f"{shown} {self.metrics[shown]:.4g}",
            "yes" if self.is_whole else f"no: {self.damage[0]}",
        )


class Checkpoints(list[CheckpointInfo]):
    """A list of checkpoints that a cell shows as a table, the newest last."""

    def __repr__(self) -> str:
        return repr(self._table)

    def _repr_html_(self) -> str:
        return self._table._repr_html_()

    @property
    def _table(self) -> Table:
        return Table(_COLUMNS, [info.cells() for info in self])


def checkpoints(directory: str | os.PathLike[str], *, read: bool = False) -> Checkpoints:
    """Return the checkpoints of a project, or in a folder, the oldest first. A cell shows them as a table.

    Args:
        directory: the ``project_dir``, a folder with checkpoints in it, or a checkpoint.
        read: compare the checksums too; else a file counts as whole if it has the size that it had.

    Raises:
        ConfigError: there is no such folder.
    """
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise ConfigError(f"There is no folder {path} with checkpoints in it.")
    infos = []
    for parent in (path.parent, path, path / "checkpoints"):
        entries = [path] if parent == path.parent else sorted(parent.iterdir()) if parent.is_dir() else []
        for folder in entries:
            is_ours = folder.is_dir() and not folder.name.startswith(".")
            if is_ours and (published(folder, "state") / MANIFEST_NAME).exists():
                infos.append(_info_of(folder, read=read))
    return Checkpoints(
        sorted(infos, key=lambda info: (0.0 if info.saved_at is None else info.saved_at.timestamp(), info.step or 0))
    )


def _info_of(folder: Path, *, read: bool) -> CheckpointInfo:
    where, manifest, damage = examine(folder)
    if manifest is None:
        return CheckpointInfo(
            folder=folder, step=None, epoch=None, saved_at=None, num_bytes=0, metrics={}, damage=tuple(damage)
        )
    if read and not damage:
        with Verification(where, manifest.files) as compared:
            damage = compared.result()
    return CheckpointInfo(
        folder=folder,
        step=manifest.global_step,
        epoch=next(zip(manifest.epochs, manifest.positions, strict=True), None),
        saved_at=datetime.fromisoformat(manifest.saved_at),
        num_bytes=sum(file.size for file in manifest.files.values()),
        metrics=manifest.metrics,
        damage=tuple(damage),
    )
