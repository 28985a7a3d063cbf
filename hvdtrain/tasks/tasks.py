"""The tasks that use a trained model: eval, forward, search, cleanup_old_models."""

from __future__ import annotations

import json
import time
from pathlib import Path

from hvdtrain.checkpoint.best import BestModel
from hvdtrain.checkpoint.folder import CheckpointFolder, CleanupRule, parse_rule
from hvdtrain.checkpoint.saver import clean_up
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.runtime.log import open_log, say
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text
from hvdtrain.schedule.history import EpochRecord, wanted_of
from hvdtrain.session import open_communicator, open_session
from hvdtrain.settings import Settings
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.forward import forward
from hvdtrain.training.step_log import open_step_log


def evaluate_all(settings: Settings) -> None:
    """Evaluate a trained model on dev, eval and eval_datasets. Raises: HvdtrainError."""
    if not settings.evaluations:
        raise ConfigError(["task: expected dev, eval or eval_datasets for the task eval, got none of them"])
    with (
        open_session(settings, "evaluate") as session,
        open_step_log(settings.log, session.comm.rank) as step_log,
    ):
        epoch = session.progress.epoch
        lines = []
        for feed in session.feeds:
            means = evaluate(session.comm, session.learner, session.watchdog, feed, max(1, epoch), step_log=step_log)
            lines.append(f"{feed.name}: {text(means)}")
        say(1, f"epoch {epoch} evaluation: {'; '.join(lines)}")


def forward_all(settings: Settings) -> None:
    """Run the config's forward_step over forward_data or search_data. Raises: HvdtrainError."""
    if settings.forward is None:
        raise ConfigError(["forward_data: expected a dataset, got None"])
    with open_session(settings, "forward") as session:
        began = time.perf_counter()
        [feed] = session.feeds
        epoch, prefix = max(1, session.progress.epoch), Path(settings.run.model)
        steps = forward(session.comm, session.learner, session.watchdog, feed, epoch, settings.forwarding, prefix)
        say(3, f"Forward {steps} steps, {clock_text(time.perf_counter() - began)} elapsed")


def clean_up_all(settings: Settings) -> None:
    """Remove the models that `cleanup_old_models` does not keep, by the scores in scores.jsonl. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        prefix = Path(settings.run.model)
        higher = settings.scoring.higher_is_better
        rule = parse_rule(settings.saving.cleanup_old_models, higher) or CleanupRule(higher_is_better=higher)
        checkpoints = CheckpointFolder(prefix, FRAMEWORKS[settings.run.backend].suffix)

        def remove() -> None:
            history = _history(prefix.parent / "scores.jsonl")
            clean_up(checkpoints, rule, {record.epoch: record.scores for record in history})
            BestModel(checkpoints, wanted_of(settings.measure), higher).note(history)

        on_rank_zero(comm, remove, name="clean_up")


def _history(path: Path) -> list[EpochRecord]:
    """The epochs in a scores.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    epochs = [json.loads(line) for line in lines if line.endswith("}")]
    scores = [{name: float(score) for name, score in epoch["scores"].items()} for epoch in epochs]
    return [EpochRecord(epoch["epoch"], epoch.get("learning_rate", 0.0), own) for epoch, own in zip(epochs, scores, strict=True)]
