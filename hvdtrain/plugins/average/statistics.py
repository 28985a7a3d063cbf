"""BatchNorm's statistics, computed anew on training data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.data.types import Batch
from hvdtrain.learner.base import Learner
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.agreement import plan_together


def recompute_statistics(comm: Communicator, learner: Learner, watchdog: Watchdog, feed: Feed, epoch: int) -> int:
    """Collective. Make the statistics of all BatchNorm layers the mean over the batches of an epoch; return how many layers.

    Raises:
        DataError: the data cannot be read.
    """
    watchdog.beat("planning the batches for statistics", "planning")
    rank_batches = feed.rank_batches(plan_together(comm, feed, epoch))
    rounds = max(comm.gather(len(rank_batches), name="statistics.rounds"))
    with feed.read(rank_batches, epoch, learner.staging) as read:

        def batches() -> Iterator[Batch | None]:
            for number in range(rounds):
                watchdog.beat(f"statistics, batch {number}", "evaluation")
                batch = next(read, None)
                batch = None if batch is None else batch.if_any
                if batch is None:
                    yield None
                else:
                    with Naming(batch, feed):
                        yield batch

        layers = learner.fresh_statistics(batches(), partial(all_reduce, comm, op="sum", name="statistics"))
    log.info(f"the statistics of {len(layers)} BatchNorm layers were computed anew on {feed.name}, epoch {epoch}")
    return len(layers)
