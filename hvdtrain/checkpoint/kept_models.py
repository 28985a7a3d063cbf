"""Which models of a training are there: keeps best.json up to date, and asks plug-ins what is still needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import inf

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import Age, CheckpointHooks, needed_epochs
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.schedule.history import EpochRecord


class KeptModels:
    """Decides which models stay, after each one that is written.

    Args:
        best: None: there is no best.json, and no model within an epoch.
    """

    def __init__(
        self, checkpoints: CheckpointFolder, best: BestModel | None = None, checkpoint_hooks: Sequence[CheckpointHooks] = ()
    ) -> None:
        self._checkpoints = checkpoints
        self._best = best
        self._hooks = checkpoint_hooks

    def within_epochs(self, progress: Progress, new: Age | None = None) -> set[Age]:
        """The ages of the models within epochs that are kept: those that may be the best, or that plug-ins need.

        Args:
            new: the age of a model that would be written.
        """
        if not progress.evaluations or self._best is None or not self._best.within_epochs:
            return set()
        existing = {checkpoint.age for checkpoint in self._checkpoints.models()} | ({new} if new is not None else set())
        return self._needed_within(self._best, progress.records, existing)

    def needed(self, progress: Progress, existing: Collection[Age]) -> set[Age]:
        """Of the ages of models, those of all that plug-ins need, and of the best one within an epoch."""
        if self._best is None:
            return set()
        records = self._best.records(progress)
        last = records[-1].age if records else (0, 0.0)  # later models are of another training
        ages = sorted(age for age in existing if age <= last)
        epochs = needed_epochs(self._hooks, [epoch for epoch, step in ages if step == inf], progress.history)
        return {(epoch, inf) for epoch in epochs} | self._needed_within(self._best, records, ages)

    def _needed_within(self, best: BestModel, records: Sequence[EpochRecord], existing: Collection[Age]) -> set[Age]:
        with_model = [record for record in records if record.age in existing]
        winner = best.measure.best(with_model)
        ages = {age for hooks in self._hooks for age in hooks.needed_within(with_model)}
        return ages if winner is None or winner.at_step is None else {*ages, winner.age}

    def after_epoch(self, progress: Progress) -> None:
        """Update best.json and remove models, once that of an epoch is written."""
        self.note_best(progress)  # before the model that best.json names may be removed
        needed = partial(needed_epochs, self._hooks, history=progress.history)
        removals = [hooks.clean_up(self._checkpoints, progress.history, needed) for hooks in self._hooks]
        if any(removals):
            self.note_best(progress)

    def note_best(self, progress: Progress) -> None:
        """Update best.json."""
        if self._best is not None:
            self._best.update(self._best.records(progress))
