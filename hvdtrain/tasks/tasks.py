"""The value of the key `task` that evaluates a trained model."""

from __future__ import annotations

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import name_scores, text
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
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
