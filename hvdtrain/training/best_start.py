"""Lets an epoch begin with the best model so far."""

from __future__ import annotations

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime import log
from hvdtrain.schedule.last_best import LastBestRule
from hvdtrain.schedule.measure import Measure


class BestStart:
    """Loads a better model before an epoch, on all ranks.

    Args:
        measure: compares epochs.
    """

    def __init__(
        self,
        rule: LastBestRule,
        measure: Measure,
        saver: Saver,
        loader: Loader,
        checkpoints: CheckpointFolder,
        state: StateBase,
    ) -> None:
        self._rule = rule
        self._measure = measure
        self._saver = saver
        self._loader = loader
        self._checkpoints = checkpoints
        self._state = state

    def load(self, epoch: int, progress: Progress) -> None:
        """Collective. If an earlier epoch is better than the last one, load its model, and begin with a new optimizer.

        The number of steps and the random numbers go on.

        Raises:
            CheckpointError: that epoch has no model any more.
        """
        best = self._rule.better_epoch(epoch, progress.history, self._measure, max(1, self._state.num_pretrain_epochs))
        if best is None:
            return
        self._saver.finish()  # it may just be written
        file = self._checkpoints.at(best.epoch).model_file
        name = self._measure.name([best])
        last = progress.history[-1]
        better = "" if name is None else f": {name} {best.scores[name]:.6g} is better than {last.scores[name]:.6g}"
        if not file.exists():
            raise CheckpointError(
                f"use_last_best_model: expected the model of epoch {best.epoch}{better}, got no {file} (save_interval and "
                "cleanup_old_models say which models are there)"
            )
        self._loader.load_model(file, None)
        self._state.reset_optimizer()
        log.info(f"epoch {epoch} begins with the model of epoch {best.epoch} and a new optimizer{better} in epoch {last.epoch}")
