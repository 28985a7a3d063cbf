"""The floating-point operations of an epoch, and the share of what the ranks' devices can do."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan


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

    def epoch_flops(self, feed: Feed, plan: Plan, epoch: int, position: int, steps: int, seconds: float) -> dict[str, float]:
        """By name, the numbers of an epoch for its report.

        Args:
            position: the number of batches that were trained on.
            steps: the number of steps.
            seconds: those of training, with everything that is not computing.
        """
        frames = plan.num_frames(feed.lengths_in(epoch)[self.key], 0, position)
        total = feed.passes * frames / (1 - feed.padding(plan, epoch)[self.key]) * self.per_frame
        share = total / (max(seconds, 1e-9) * self.num_ranks * self.peak)
        return {"epoch": total, "step": total / max(steps, 1), "peak": self.num_ranks * self.peak, "share": share}
