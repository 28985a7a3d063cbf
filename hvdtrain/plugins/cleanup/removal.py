"""Removes the models that neither the rule of a config keeps nor a plug-in needs."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import CheckpointHooks, Needed
from hvdtrain.config.check import did_you_mean
from hvdtrain.plugins.cleanup.keys import OldModelsKeys
from hvdtrain.plugins.cleanup.rule import PATTERN, CleanupRule, parse_rule
from hvdtrain.runtime import log
from hvdtrain.schedule.history import META, EpochRecord
from hvdtrain.settings import Settings


def cleanup_of(settings: Settings) -> Cleanup | None:
    """What removes models after every epoch; None: all stay."""
    rule = parse_rule(settings.of(OldModelsKeys).cleanup_old_models, settings.scoring.higher_is_better)
    return None if rule is None else Cleanup(rule)


class Cleanup(CheckpointHooks):
    """Removes models after every epoch."""

    def __init__(self, rule: CleanupRule) -> None:
        self._rule = rule
        self._has_checked = False

    def clean_up(self, checkpoints: CheckpointFolder, history: Sequence[EpochRecord], needed: Needed) -> bool:
        rule = self._rule
        self._check_names(history)
        epochs = checkpoints.finished_epochs()
        reasons_to_keep = rule.epochs_to_keep(epochs, {record.epoch: record.comparable for record in history})
        for epoch, reasons in needed(epochs).items():
            reasons_to_keep[epoch] = [*reasons_to_keep.get(epoch, []), *reasons]
        reasons_to_keep = dict(sorted(reasons_to_keep.items()))
        removed = [epoch for epoch in epochs if epoch not in reasons_to_keep]
        if not removed:
            return False
        log.info(f"We have stored models for epochs {_shorten(epochs)} and keep epochs {list(reasons_to_keep)}.")
        reasons = [f"{epoch}: {', '.join(why)}" for epoch, why in reasons_to_keep.items()]
        log.info(f"Why they are kept: {'; '.join(reasons)}.")
        if rule.keep is None and any(why == [PATTERN] for why in reasons_to_keep.values()):
            log.info("The pattern is the default of `keep`; cleanup_old_models = {..., 'keep': []} keeps no others.")
        log.info(f"We will delete the models of epochs {removed}.")
        checkpoints.remove(checkpoints.checkpoint_at(epoch) for epoch in removed)
        return True

    def _check_names(self, history: Sequence[EpochRecord]) -> None:
        """Warn of scores to ignore that no epoch has, once. It is no error: configs for RETURNN name what they may have."""
        names = sorted({name for record in history for name in record.scores if not name.startswith(META)})
        if self._has_checked or not names:
            return
        self._has_checked = True
        for name in self._rule.ignore_score_keys:
            if name not in names:
                log.warning(
                    f"cleanup_old_models.ignore_score_keys: expected scores among {', '.join(names)}, got {name!r}, which no "
                    f"epoch has{did_you_mean(name, names)}"
                )


def _shorten(epochs: list[int]) -> str:
    if len(epochs) <= 6:
        return str(epochs)
    return f"[{', '.join(map(str, epochs[:3]))}, ..., {', '.join(map(str, epochs[-3:]))}]"
