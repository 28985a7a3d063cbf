"""The values of the key `task` other than train: eval and cleanup_old_models, which use a trained model."""

from __future__ import annotations

import json
from pathlib import Path

from hvdtrain.checkpoint.average_rules import Averages, parse_averages
from hvdtrain.checkpoint.cleanup import CleanupRule, parse_rule
from hvdtrain.checkpoint.kept_models import clean_up
from hvdtrain.checkpoint.progress import BestModel
from hvdtrain.comm.base import Communicator, on_rank_zero
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.report.json_lines import DAMAGED_LINE_ERRORS
from hvdtrain.runtime import log
from hvdtrain.runtime.log import open_log
from hvdtrain.runtime.records import records_of
from hvdtrain.runtime.scores import name_scores, text
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import wrong_directions
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.ranks import open_communicator
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.step_log import open_step_log
from hvdtrain.training.vote import TASK_INTERVAL, Requests, Vote


def evaluate_all(settings: Settings, comm: Communicator | None = None) -> dict[str, float]:
    """Evaluate a trained model on dev, eval and eval_datasets; return the scores ('dev_loss_ce'). Raises: HvdtrainError.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.
    """
    if not settings.evaluations:
        raise ConfigError.of("missing", "task: expected dev, eval or eval_datasets for the task eval, got none of them")
    with (
        open_session(settings, "evaluate", comm) as session,
        open_step_log(settings.log, session.comm.rank, settings.process) as step_log,
    ):
        epoch = session.progress.epoch
        lines = []
        scores: dict[str, float] = {}
        stop_vote = Vote(session.comm, session.learner.numbers, TASK_INTERVAL)
        for feed in session.epochs.feeds(session.feeds, max(1, epoch)):
            means = evaluate(
                session.comm,
                session.learner,
                session.watchdog,
                feed,
                max(1, epoch),
                after_step=lambda: stop_vote.step(Requests),
                step_log=step_log,
            )
            lines.append(f"{feed.name}: {text(means)}")
            scores |= name_scores(feed.name, means)
        stop_vote.finish()
        log.result(f"epoch {epoch} evaluation: {'; '.join(lines)}")
        return scores


def clean_up_all(settings: Settings) -> None:
    """Remove the models that `cleanup_old_models` does not keep, given the scores in scores.jsonl. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        prefix = Path(settings.run.model)
        higher = settings.scoring.higher_is_better
        rule = parse_rule(settings.saving.cleanup_old_models, higher) or CleanupRule(higher_is_better=higher)
        checkpoints = checkpoint_folder(settings)

        def remove() -> None:
            history = _history(records_of(prefix) / "scores.jsonl")
            if rule.keep_best_n and (problems := wrong_directions(history, {}, True, higher, settings.origins)):
                raise ConfigError(problems)
            before = checkpoints.finished_epochs()
            averages = Averages(parse_averages(settings.saving.average_checkpoints), settings.measure)
            clean_up(checkpoints, rule, history, averages)
            BestModel(checkpoints, settings.measure).update(history)
            if checkpoints.finished_epochs() == before:
                log.info(f"{prefix}: of {len(before)} models, none is to be deleted.")

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
