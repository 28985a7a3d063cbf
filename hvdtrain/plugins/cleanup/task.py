"""The task cleanup_old_models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from hvdtrain.checkpoint.hooks import needed_epochs
from hvdtrain.checkpoint.progress import BestModel
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.cleanup.keys import OldModelsKeys
from hvdtrain.plugins.cleanup.removal import Cleanup
from hvdtrain.plugins.cleanup.rule import CleanupRule, parse_rule
from hvdtrain.report.json_lines import DAMAGED_LINE_ERRORS
from hvdtrain.runtime import log
from hvdtrain.runtime.log import open_log
from hvdtrain.runtime.records import records_of
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import wrong_directions
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder, checkpoint_hooks_of
from hvdtrain.start_up.ranks import open_communicator


def clean_up_all(settings: Settings) -> None:
    """Remove the models that `cleanup_old_models` does not keep, given the scores in scores.jsonl. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        prefix = Path(settings.run.model)
        higher = settings.scoring.higher_is_better
        rule = parse_rule(settings.of(OldModelsKeys).cleanup_old_models, higher) or CleanupRule(higher_is_better=higher)
        checkpoints = checkpoint_folder(settings)

        def remove() -> None:
            history = _history(records_of(prefix) / "scores.jsonl")
            if rule.keep_best_n and (problems := wrong_directions(history, {}, ["cleanup_old_models"], higher, settings.origins)):
                raise ConfigError(problems)
            needed = partial(needed_epochs, checkpoint_hooks_of(settings), history=history)
            has_removed = Cleanup(rule).clean_up(checkpoints, history, needed)
            BestModel(checkpoints, settings.measure).update(history)
            if not has_removed:
                log.info(f"{prefix}: of {len(checkpoints.finished_epochs())} models, none is to be deleted.")

        on_rank_zero(comm, remove, name="clean_up")


def _history(path: Path) -> list[EpochRecord]:
    """The epochs in a scores.jsonl. Raises: DataError, if a line is damaged, since it decides which models are removed."""
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    history = []
    for number, line in enumerate(lines, start=1):
        try:
            epoch = json.loads(line.decode("utf-8"))
            scores = {name: float(score) for name, score in epoch["scores"].items()}
            losses = {name: float(scale) for name, scale in epoch.get("losses", {}).items()}
            history.append(
                EpochRecord(
                    int(epoch["epoch"]),
                    float(epoch.get("learning_rate", 0.0)),
                    scores,
                    losses,
                    is_updated=bool(epoch.get("updated", True)),
                    is_diverged=bool(epoch.get("diverged", False)),
                )
            )
        except (*DAMAGED_LINE_ERRORS, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: expected the scores of an epoch, got a damaged line: {error!r} (without them, "
                "the best models are unknown; resuming the training sets the damaged file aside)"
            ) from None
    return history
