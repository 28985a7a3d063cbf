"""BatchNorm's statistics, computed anew on training data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol, runtime_checkable

from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.data.types import Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Learner, Total
from hvdtrain.runtime import log
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.agreement import plan_together


@runtime_checkable
class FreshStatistics(Protocol):
    """What a learner has if it can compute the statistics of BatchNorm; PyTorch's need not."""

    def fresh_statistics(self, batches: Iterable[Batch | None], total: Total) -> list[str]:
        """Collective. Compute the statistics of all BatchNorm layers anew: the mean of those of the batches of all ranks, with
        the present parameters, in training mode. Returns the names of the layers. Nothing else changes.

        Args:
            batches: as many on every rank; None where this rank has none.
            total: sums float64 tensors over the ranks.

        Raises:
            ConfigError: the framework cannot.
        """


def recompute_statistics(comm: Communicator, learner: Learner, watchdog: Watchdog, feed: Feed, epoch: int) -> int:
    """Collective. Make the statistics of all BatchNorm layers the mean over the batches of an epoch; return how many layers.

    Raises:
        ConfigError: the framework cannot.
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

        layers = _statistics(learner, batches(), partial(all_reduce, comm, op="sum", name="statistics"))
    log.info(f"the statistics of {len(layers)} BatchNorm layers were computed anew on {feed.name}, epoch {epoch}")
    return len(layers)


def _statistics(learner: Learner, batches: Iterable[Batch | None], total: Total) -> list[str]:
    """What `FreshStatistics` declares, for any learner."""
    if isinstance(learner, FreshStatistics):
        return learner.fresh_statistics(batches, total)
    from hvdtrain.learner.torch.step import TorchLearner  # here: other frameworks train without PyTorch

    if not isinstance(learner, TorchLearner):
        raise ConfigError.of(
            "unsupported", f"recompute_statistics: expected a model of PyTorch or Keras, got the learner {type(learner).__name__}"
        )
    from hvdtrain.plugins.average.batch_norm import fresh_statistics

    return fresh_statistics(learner, batches, total)
