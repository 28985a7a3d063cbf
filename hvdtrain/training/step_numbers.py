"""The records that rank 0 makes of some steps of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.data.feed import Feed
from hvdtrain.learner.meter import Meter
from hvdtrain.report.steps import StepReceiver, StepRecord, peak_memory
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import Timer
from hvdtrain.training.epoch import EpochClock, TrainingEpoch
from hvdtrain.training.step_log import StepReport


class StepNumbers:
    """Makes records and passes them on, without waiting for a GPU or other ranks.

    Args:
        receivers: called with every record.
        timer: has the seconds that rank 0 waited for data and for averaging parameters.
        meter: of rank 0's learner.
        clock: has the seconds of the epoch, without those of evaluations within it.
    """

    def __init__(self, receivers: Sequence[StepReceiver], timer: Timer, meter: Meter, clock: EpochClock) -> None:
        self._receivers = list(receivers)
        self._failed: set[int] = set()
        self._timer = timer
        self._meter = meter
        self._clock = clock

    def begin(self, epoch: TrainingEpoch, feed: Feed) -> None:
        """The training of an epoch begins or continues: its next record is about what follows."""
        self._epoch = epoch
        self._feed = feed
        self._lengths = feed.lengths_in(epoch.current.epoch)
        self._position = epoch.current.position
        self._elapsed = self._clock.elapsed(epoch.current)
        self._seconds = self._seconds_so_far()

    def step(self, report: StepReport, scores: Mapping[str, float]) -> StepRecord:
        """Record a step; `scores` are the means since the last record."""
        current = self._epoch.current
        elapsed = self._clock.elapsed(current)
        seconds = self._seconds_so_far()
        passed = max(elapsed - self._elapsed, 1e-9)
        waited, computed = (min(max((new - old) / passed, 0.0), 1.0) for new, old in zip(seconds, self._seconds, strict=True))
        plan = self._epoch.plan
        batches = self._position, current.position
        ranks = self._feed.passes  # how many have about as much in plans of their own
        record = StepRecord(
            epoch=current.epoch,
            step=report.number,
            global_step=current.first_step + report.number,
            progress=report.complete,
            elapsed=elapsed,
            learning_rate=self._epoch.first_rate if report.learning_rate is None else report.learning_rate,
            scores=scores,
            gradient_norm=self._meter.gradient_norm(),
            sequences_per_second=ranks * self._feed.sequences_among(plan.indices_between(*batches)) / passed,
            frames_per_second={key: ranks * plan.num_frames(column, *batches) / passed for key, column in self._lengths.items()},
            memory=peak_memory(self._meter),
            computing=computed,
            data_wait=waited,
        )
        self._elapsed = elapsed
        self._seconds = seconds
        self._position = current.position
        for number, receive in enumerate(self._receivers):
            try:
                receive(record)
            except Exception as error:  # an observer never ends a training
                if number not in self._failed:
                    self._failed.add(number)
                    trouble = f"the numbers of step {record.step} were not recorded, training continues"
                    log.warning(f"{trouble}: {type(error).__name__}: {error}")
        return record

    def _seconds_so_far(self) -> tuple[float, float]:
        """Seconds spent waiting for data, and computing as in the report of an epoch, since a fixed time."""
        seconds = self._timer.seconds
        return seconds.get("data wait", 0.0), self._meter.step_seconds() + seconds.get("parameter sync", 0.0)
