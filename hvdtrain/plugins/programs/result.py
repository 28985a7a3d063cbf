"""What `hvdtrain.train` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.plugins.programs.table import epoch_table
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.training.average import Average


@dataclass(frozen=True)
class Best:
    """The best epoch so far, as best.json names it (docs/resuming.md).

    Attributes:
        measure: the score that compares epochs.
        score: its value in this epoch.
        scores: all scores of the epoch, by name.
        checkpoint: the file with the epoch's model; None: it was not saved, or cleanup_old_models removed it.
    """

    epoch: int
    measure: str
    score: float
    scores: Mapping[str, float]
    checkpoint: Path | None


@dataclass(frozen=True)
class Result:
    """The result of `train`.

    Attributes:
        history: one entry for each finished epoch, also of earlier starts: `epoch`, `learning_rate` (of the epoch, before a
            schedule of steps changes it) and `scores`.
        best: the best epoch; None: there are no scores.
        checkpoint: the file with the last epoch's model.
        num_epochs: how many epochs this call has trained; 0: all of them had been trained before.
        averages: those of `average_checkpoints`, in its order.
    """

    history: Sequence[EpochRecord]
    best: Best | None
    checkpoint: Path
    num_epochs: int
    averages: Sequence[Average]
    _model: Callable[[], Any] = field(repr=False)

    @property
    def scores(self) -> Mapping[str, float]:
        """The scores of the last epoch by name, such as 'train_loss_ce' and 'dev_loss_ce'."""
        return self.history[-1].scores if self.history else {}

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each epoch, the best one in bold."""
        table = epoch_table(self.history, None if self.best is None else self.best.epoch)
        return f"{table}<code>{escape(str(self.checkpoint))}</code>"

    @cached_property
    def model(self) -> Any:
        """The trained model after the last epoch, as its checkpoint has it, ready to be evaluated; `load_model` loads others.

        If separate processes trained it, it is loaded on first access.
        """
        return self._model()
