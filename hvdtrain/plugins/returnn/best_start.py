"""Lets an epoch begin with the best model so far."""

from __future__ import annotations

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver_base import SaverBase
from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.returnn.last_best import LastBestKeys, LastBestRule
from hvdtrain.runtime import log
from hvdtrain.schedule.measure import Measure
from hvdtrain.settings import Settings


def best_start_of(settings: Settings) -> BestStart | None:
    """What loads the best model; None: every epoch continues with the last one."""
    rule = settings.of(LastBestKeys).rule
    return None if rule is None else BestStart(rule, settings.measure)


class BestStart(CheckpointHooks):
    """Loads a better model before an epoch, and begins with a new optimizer. The number of steps and the random numbers go on.

    Args:
        measure: compares epochs.
    """

    def __init__(self, rule: LastBestRule, measure: Measure) -> None:
        self._rule = rule
        self._measure = measure

    def begin_epoch(self, epoch: int, progress: Progress, saver: SaverBase, loader: Loader) -> None:
        state = loader.state
        best = self._rule.better_epoch(epoch, progress.history, self._measure, max(1, state.num_pretrain_epochs))
        if best is None:
            return
        saver.finish()  # it may just be written
        file = loader.checkpoints.checkpoint_at(best.epoch).model_file
        name = self._measure.name([best])
        last = progress.history[-1]
        better = "" if name is None else f": {name} {best.scores[name]:.6g} is better than {last.scores[name]:.6g}"
        if not file.exists():
            raise CheckpointError(
                f"use_last_best_model: expected the model of epoch {best.epoch}{better}, got no {file} (save_interval and "
                "cleanup_old_models say which models are there)"
            )
        loader.load_model(file, None)
        state.reset_optimizer()
        log.info(f"epoch {epoch} begins with the model of epoch {best.epoch} and a new optimizer{better} in epoch {last.epoch}")
