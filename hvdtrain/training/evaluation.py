"""Scores of a dataset, and the error about losses that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.checkpoint.progress import Within
from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.feed import Feed
from hvdtrain.data.types import Dataset
from hvdtrain.errors import TrainingError
from hvdtrain.learner.base import Learner, NotFinite
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.step_log import StepLog


def evaluate(
    comm: Communicator,
    learner: Learner,
    watchdog: Watchdog,
    feed: Feed,
    epoch: int,
    after_round: Callable[[], None],
    step_log: StepLog,
) -> dict[str, float]:
    """Collective. The exact mean losses and errors over a whole dataset.

    Args:
        after_round: called by all ranks after each step, in which every rank evaluates a batch.
    """
    plan = together(comm, lambda: feed.plan(epoch), name=f"plan_{feed.name}")
    rounds = -(-plan.num_batches // comm.size)
    own: list[Scores] = []

    def take_scores() -> Scores:
        own.append(learner.meter.take_scores())
        return own[-1]

    step_log.begin(epoch, feed.name, rounds)
    with feed.read(feed.share(plan), epoch) as batches:
        for number in range(rounds):
            watchdog.beat(f"epoch {epoch}, evaluation of {feed.name}, batch {number}")
            batch = next(batches, None)
            if batch is not None:
                learner.evaluate(batch)
            step_log.step(number + 1, (number + 1) / rounds, take_scores, None, batch, learner.meter.peak_memory)
            after_round()
    step_log.end()
    take_scores()
    parts = comm.gather(Scores.merged(own), name=f"scores.{feed.name}")
    return Scores.merged(parts).means()


HEAD = (
    "train_step: expected finite losses, got others (stop_on_nonfinite_train_score = False goes on nevertheless; "
    "num_allowed_consec_invalid_gradient_steps skips such updates):"
)

FEW = 3
"""The number of losses reported for each rank: those that follow are not finite either."""


def not_finite(comm: Communicator, dataset: Dataset, found: Sequence[NotFinite], within: Within) -> TrainingError:
    """Collective. The error with what every rank found."""

    def told() -> list[str]:
        return [_line(one, dataset, within) for one in found[:FEW]]

    by_rank = comm.gather(together(comm, told, name="not_finite_tags"), name="not_finite")
    lines = [f"rank {rank}: {line}" for rank, lines in enumerate(by_rank) for line in lines]
    error = TrainingError("\n  ".join([HEAD, *lines]))
    error.on_every_rank = True
    return error


def _line(one: NotFinite, dataset: Dataset, within: Within) -> str:
    sequences = ", ".join(dataset.tags(one.indices))
    broken = ", ".join(one.parameters) or "none, so the loss itself is the cause"
    return (
        f"{one.loss} = {one.value} in step {one.step - within.first_step} of epoch {within.epoch}, sequences {sequences}; "
        f"parameters that are not finite: {broken}"
    )
