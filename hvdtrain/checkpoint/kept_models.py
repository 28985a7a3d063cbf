"""Which models of a training are there: keeps best.json up to date, and removes models that are no longer needed."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.checkpoint.average_rules import Averages
from hvdtrain.checkpoint.cleanup import PATTERN, CleanupRule
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.runtime import log
from hvdtrain.schedule.history import EpochRecord

NO_AVERAGES = Averages()


class KeptModels:
    """Decides which models stay, after each one that is written.

    Args:
        cleanup: None: the models of all epochs.
        averages: what they need is kept as well.
        best: None: there is no best.json, and no model within an epoch.
    """

    def __init__(
        self,
        checkpoints: CheckpointFolder,
        cleanup: CleanupRule | None = None,
        averages: Averages = NO_AVERAGES,
        best: BestModel | None = None,
    ) -> None:
        self._checkpoints = checkpoints
        self._cleanup = cleanup
        self._averages = averages
        self._best = best

    def within_epochs(self, progress: Progress, new: tuple[int, float] | None = None) -> set[tuple[int, float]]:
        """The ages of the models within epochs that are kept: those that may be the best, or that averages need.

        Args:
            new: the age of a model that would be written.
        """
        if not progress.evaluations or self._best is None or not self._best.within_epochs:
            return set()
        existing = {checkpoint.age for checkpoint in self._checkpoints.models()} | ({new} if new is not None else set())
        return self._averages.kept_within(progress.records, existing)

    def after_epoch(self, progress: Progress) -> None:
        """Update best.json and remove models, once that of an epoch is written."""
        self.note_best(progress)  # before the model that best.json names may be removed
        if self._cleanup is not None:
            clean_up(self._checkpoints, self._cleanup, progress.history, self._averages)
            self.note_best(progress)

    def note_best(self, progress: Progress) -> None:
        """Update best.json."""
        if self._best is not None:
            self._best.update(self._best.records(progress))


def clean_up(
    checkpoints: CheckpointFolder, rule: CleanupRule, history: Sequence[EpochRecord], averages: Averages = NO_AVERAGES
) -> None:
    """Remove the models that neither a rule keeps nor an average needs."""
    epochs = checkpoints.finished_epochs()
    reasons_to_keep = rule.epochs_to_keep(epochs, {record.epoch: record.comparable for record in history})
    for epoch, reasons in averages.epochs_to_keep(epochs, history).items():
        reasons_to_keep[epoch] = [*reasons_to_keep.get(epoch, []), *reasons]
    reasons_to_keep = dict(sorted(reasons_to_keep.items()))
    removed = [epoch for epoch in epochs if epoch not in reasons_to_keep]
    if removed:
        log.info(f"We have stored models for epochs {_shorten(epochs)} and keep epochs {list(reasons_to_keep)}.")
        reasons = [f"{epoch}: {', '.join(why)}" for epoch, why in reasons_to_keep.items()]
        log.info(f"Why they are kept: {'; '.join(reasons)}.")
        if rule.keep is None and any(why == [PATTERN] for why in reasons_to_keep.values()):
            log.info("The pattern is the default of `keep`; cleanup_old_models = {..., 'keep': []} keeps no others.")
        log.info(f"We will delete the models of epochs {removed}.")
        checkpoints.remove(checkpoints.at(epoch) for epoch in removed)


def _shorten(epochs: list[int]) -> str:
    if len(epochs) <= 6:
        return str(epochs)
    return f"[{', '.join(map(str, epochs[:3]))}, ..., {', '.join(map(str, epochs[-3:]))}]"
