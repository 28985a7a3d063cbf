"""Evaluating a model on a dataset that is dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.comm.base import Communicator, together
from hvdtrain.data.feed import Feed
from hvdtrain.learner.base import Learner
from hvdtrain.scores import Scores
from hvdtrain.step_log import StepLog
from hvdtrain.watchdog import Watchdog


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
        after_round: called by all ranks equally often, after each of the rounds in which every rank evaluates a batch.
    """
    plan = together(comm, lambda: feed.plan(epoch), name=f"plan_{feed.name}")
    rounds = -(-plan.num_batches // comm.size)
    own: list[Scores] = []

    def take_scores() -> Scores:
        own.append(learner.take_scores())
        return own[-1]

    step_log.begin(epoch, feed.name, rounds)
    with feed.read(feed.share(plan), epoch) as batches:
        for number in range(rounds):
            watchdog.beat(f"epoch {epoch}, evaluation of {feed.name}, batch {number}")
            batch = next(batches, None)
            if batch is not None:
                learner.evaluate(batch)
            step_log.step(number + 1, (number + 1) / rounds, take_scores, None, batch, learner.peak_memory)
            after_round()
    step_log.end()
    take_scores()
    parts = comm.gather(Scores.merged(own), name=f"scores.{feed.name}")
    return Scores.merged(parts).means()
