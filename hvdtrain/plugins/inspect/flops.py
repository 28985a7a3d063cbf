"""The first batch of an epoch and what its step costs; from it, the operations of epochs (`count_flops`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hvdtrain.data.feed import Feed
from hvdtrain.data.naming import Naming
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Batch
from hvdtrain.plugins.inspect import FlopKeys
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.settings import Settings
from hvdtrain.training.agreement import plan_together
from hvdtrain.training.session import Session


@dataclass(frozen=True)
class FlopRate:
    """What `count_flops` found out about a batch, from which the operations of other batches are estimated.

    Attributes:
        key: the data key whose frames are counted.
        per_frame: the operations of forward and backward for each of its frames, padding included.
        peak: the operations per second of one device.
        num_ranks: the number of devices.
    """

    key: str
    per_frame: float
    peak: float
    num_ranks: int

    def __call__(self, report: EpochReport) -> Mapping[str, float]:
        """The operations of the `epoch` and of a `step` over all ranks, their `peak` per second, and the `share` of it."""
        total = report.num_frames[self.key] / (1 - report.padding[self.key]) * self.per_frame
        share = total / (max(report.elapsed, 1e-9) * self.num_ranks * self.peak)
        return {"epoch": total, "step": total / max(report.steps, 1), "peak": self.num_ranks * self.peak, "share": share}


@contextmanager
def first_batch(session: Session, feed: Feed, plan: Plan, epoch: int) -> Iterator[Batch | None]:
    """This rank's first batch of an epoch, which errors in the `with` block describe; None: it has none, or a broken one."""
    with feed.read(feed.rank_batches(plan)[:1], epoch, session.learner.staging) as batches:
        batch = next((content for batch in batches if (content := batch.if_any) is not None), None)
        with Naming(batch, feed):
            yield batch


def measure_flops(settings: Settings, session: Session) -> FlopRate | None:
    """Collective. On rank 0, measures epochs by the operations of the next epoch's first batch; None: nothing is counted."""
    if not settings.of(FlopKeys).count_flops:
        return None
    epoch = session.progress.epoch + 1
    feed = session.epochs.feeds(session.feeds, epoch)[0]
    plan = plan_together(session.comm, feed, epoch)
    key = "data" if "data" in feed.lengths_in(epoch) else next(iter(feed.lengths_in(epoch)))
    if session.comm.rank != 0:
        return None
    from hvdtrain.plugins.inspect.torch_cost import step_cost  # imports the framework

    with first_batch(session, feed, plan, epoch) as batch:
        if batch is not None:
            lengths = batch.data[key].seq_lens
            num_frames = int(lengths.sum()) if key in feed.packed_keys else len(lengths) * int(lengths.max())
            cost = step_cost(session.learner, batch, settings.precision.precision().dtype)
            return FlopRate(key, cost.flops / num_frames, cost.peak, session.comm.size)
    log.warning(f"count_flops: no operations are counted: rank 0 has no batch in epoch {epoch}")
    return None


@contextmanager
def log_flops(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """Logs the operations of epochs."""
    yield Reporters([FlopLog()])


class FlopLog:
    """A line about the operations of an epoch."""

    def epoch(self, report: EpochReport) -> None:
        if (flops := report.measures.get("flops")) is not None:
            log.detail(f"train epoch {report.epoch}, operations: {flops_text(flops)}")


def flops_text(flops: Mapping[str, float]) -> str:
    """The numbers of an epoch, as words.

    >>> flops_text({"epoch": 4.2e12, "step": 1.23e10, "peak": 1.2e11, "share": 0.41})
    '12.3 GFLOP per step, 41% of the 120 GFLOP/s that all ranks reach with products of large matrices'
    """
    step, peak = (f"{flops[name] / 1e9:.3g} GFLOP" for name in ("step", "peak"))
    return f"{step} per step, {flops['share']:.0%} of the {peak}/s that all ranks reach with products of large matrices"
