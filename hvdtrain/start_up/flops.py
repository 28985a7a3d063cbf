"""The first batch of an epoch, and what its step costs (`count_flops`, task summary)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Batch
from hvdtrain.learner.base import StepCost
from hvdtrain.runtime import log
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.flops import FlopRate
from hvdtrain.training.session import Session


@contextmanager
def first_batch(session: Session, feed: Feed, plan: Plan, epoch: int) -> Iterator[Batch | None]:
    """This rank's first batch of an epoch, which errors in the `with` block describe; None: it has none, or a broken one."""
    with feed.read(feed.rank_batches(plan)[:1], epoch, session.learner.staging) as batches:
        batch = next((content for batch in batches if (content := batch.if_any) is not None), None)
        with Naming(batch, feed):
            yield batch


def measure_flops(session: Session) -> FlopRate | None:
    """Collective. The operations of the first batch of the next epoch on rank 0, for each of its frames; None: not counted."""
    epoch = session.progress.epoch + 1
    feed = session.epochs.feeds(session.feeds, epoch)[0]
    plan = plan_together(session.comm, feed, epoch)
    key = "data" if "data" in feed.lengths_in(epoch) else next(iter(feed.lengths_in(epoch)))
    cost: StepCost | None = None
    num_frames = 0
    if session.comm.rank == 0:
        with first_batch(session, feed, plan, epoch) as batch:
            if batch is not None:
                lengths = batch.data[key].seq_lens
                num_frames = int(lengths.sum()) if key in feed.packed_keys else len(lengths) * int(lengths.max())
                cost = session.learner.step_cost(batch)
        if cost is None:
            log.warning(f"count_flops: no operations are counted: rank 0 has no batch in epoch {epoch}")
    if cost is None:
        return None
    return FlopRate(key, cost.flops / num_frames, cost.peak, session.comm.size)
