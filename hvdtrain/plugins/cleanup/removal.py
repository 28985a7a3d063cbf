"""Removes the models that neither the rule of a config keeps nor a plug-in needs."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import CheckpointHooks, Needed
from hvdtrain.plugins.cleanup.keys import OldModelsKeys
from hvdtrain.plugins.cleanup.rule import PATTERN, CleanupRule, parse_rule
from hvdtrain.runtime import log
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.settings import Settings


def cleanup_of(settings: Settings) -> Cleanup | None:
    """What removes models after every epoch; None: all stay."""
    rule = parse_rule(settings.of(OldModelsKeys).cleanup_old_models, settings.scoring.higher_is_better)
    return None if rule is None else Cleanup(rule)


class Cleanup(CheckpointHooks):
    """Removes models after every epoch."""

    def __init__(self, rule: CleanupRule) -> None:
        self._rule = rule

    def clean_up(self, checkpoints: CheckpointFolder, history: Sequence[EpochRecord], needed: Needed) -> bool:
        rule = self._rule
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
        checkpoints.remove(checkpoints.at(epoch) for epoch in removed)
        return True


def _shorten(epochs: list[int]) -> str:
    if len(epochs) <= 6:
        return str(epochs)
    return f"[{', '.join(map(str, epochs[:3]))}, ..., {', '.join(map(str, epochs[-3:]))}]"
