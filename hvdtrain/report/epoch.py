"""The report on a finished epoch, its log lines, and the rank that the others waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from hvdtrain.data.files import size_text
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text

FEW_SKIPPED, FEW_SKIPPED_SHARE = 5, 0.02
"""More skipped updates in an epoch than both this number and this share of them are worth a warning: a loss scale skips a few
while it comes down at first, and one whenever it has grown too large."""


@dataclass(frozen=True)
class EpochReport:
    """The results of a finished epoch.

    Attributes:
        steps: steps of the epoch; a step is one batch on every rank.
        global_step: steps done in the whole training.
        elapsed: wall time of the epoch's training in seconds, without evaluation and saving.
        computing: share of `elapsed` that rank 0 spent in training steps, collectives included.
        learning_rate: of the epoch's last update, as the optimizer used it.
        scores: score by name, such as 'train_loss_ce' or 'dev_loss_wer' (errors are called losses, too).
        padding: by data key, the share of the frames in the epoch's batches that is padding; of rank 0's batches where every
            rank goes through all data in its own order.
        seconds: for every rank, seconds by activity (data wait, compute, communication, parameter sync, evaluation, saving,
            rest).
        loss_scale: the factor of loss scaling at the end of the epoch; None without loss scaling.
        syncs: the number of syncs of the ranks' parameters (`horovod_reduce_type = "param"`).
        sent: bytes that rank 0 has handed to the network in these and as gradients.
        sent_between_groups: those of them that it has sent to other groups of ranks (`horovod_param_group`).
        seconds_before: seconds of training before the epoch was resumed; included in `elapsed`, but not in `seconds`.
        learning_rates: the 'first', 'lowest', 'highest' and 'mean' rate of the updates; None: all had the same one.
        losses: the losses that are minimized, each with its scale; the score `total` of each dataset is the sum of several.
        splits: how many training batches did not fit into a rank's memory and were split.
        skipped: how many updates were skipped, as gradients were not finite, and `updated`: how many were checked and applied; of
            all ranks, if every rank updates alone.
        broken: the number of broken sequences that the epoch's batches went without; None: none.
        diverged: True if the training has diverged (`EpochRecord.is_diverged`); None: it has not.
        epoch_learning_rate: the epoch's rate before a per-step rule and `horovod_scale_lr` are applied; None: not changed.
        goodput: where the seconds of the whole training went so far, over all its starts (`plugins/goodput/`).
        measures: by name, what plug-ins measured, each numbers by name: entries of scores.jsonl.
        computing_of_ranks: `computing` of every rank, since the epoch began or was resumed. Not in scores.jsonl.
        num_frames: by data key, the frames of the epoch without padding; on rank 0. Not in scores.jsonl.
        memory: the largest number of bytes so far that rank 0 used of its device's memory; None: unknown. Not in scores.jsonl.
    """

    epoch: int
    steps: int
    global_step: int
    elapsed: float
    computing: float
    learning_rate: float
    num_sequences: int
    scores: Mapping[str, float]
    padding: Mapping[str, float] = field(default_factory=dict)
    seconds: list[Mapping[str, float]] = field(default_factory=list)
    loss_scale: float | None = None
    syncs: int = 0
    sent: int = 0
    sent_between_groups: int = 0
    seconds_before: float = 0.0
    learning_rates: Mapping[str, float] | None = None
    epoch_learning_rate: float | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    splits: int = 0
    skipped: int = 0
    updated: int = 0
    broken: int | None = None
    diverged: bool | None = None
    goodput: Mapping[str, float] | None = None
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    computing_of_ranks: Sequence[float] = ()
    num_frames: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None

    def training_lines(self) -> list[tuple[int, str]]:
        """Lines about the epoch's training, each with the lowest verbosity that shows it. Programs read the first one."""
        start = f"train epoch {self.epoch}"
        padding = ", ".join(f"{name} {share:.1%}" for name, share in self.padding.items())
        lines = [(5, self.line), (4, f"{start}, padding: {padding}")]
        lines += [] if self.learning_rates is None else [(4, f"{start}, learning rate: {self._rates(self.learning_rates)}")]
        if self.broken:
            lines.append(
                (2, f"{start}: {self.broken} of {self.num_sequences} sequences are broken and were left out (skip_broken)")
            )
        if self.sent:
            syncs = f"{self.syncs} syncs of parameters, " if self.syncs else ""
            between = f", {size_text(self.sent_between_groups)} of it between groups" if self.sent_between_groups else ""
            lines.append((4, f"{start}, exchange: {syncs}{size_text(self.sent)} sent by each rank{between}"))
        if self.skipped:
            much = not self.is_updated or self.skipped > max(FEW_SKIPPED, FEW_SKIPPED_SHARE * self.updated)
            lines.append((2 if much else 4, f"{start}: {self.skipped_text}, as gradients were not finite"))
        if self.splits:
            lines.append((2, f"{start}: {self.splits} batches did not fit into memory and were split (split_on_oom)"))
        return lines

    def score_lines(self, datasets: Sequence[str]) -> list[tuple[int, str]]:
        """Lines about the ranks' seconds and the scores, in the same form. Programs read those about scores.

        Args:
            datasets: names of the evaluated datasets.
        """
        start = f"train epoch {self.epoch}"
        lines = [(5, f"{start}, seconds: {row}") for row in seconds_lines(self.seconds)]
        late = straggler_line(self.seconds)
        lines += [(2, f"{start}: {late}")] if late else []
        return lines + [(5, line) for line in self._score_lines(datasets)]

    @property
    def is_updated(self) -> bool:
        """Whether an update was applied: not all were skipped."""
        return bool(self.updated or not self.skipped)

    @property
    def skipped_text(self) -> str:
        """How many of the checked updates were skipped."""
        return f"skipped {self.skipped} of {self.updated + self.skipped} updates"

    @property
    def line(self) -> str:
        return (
            f"train epoch {self.epoch}, finished after {self.steps} steps, {clock_text(self.elapsed)} elapsed "
            f"({self.computing:.1%} computing time)"
        )

    def _rates(self, rates: Mapping[str, float]) -> str:
        """The range of the learning rate, in words."""
        between = f", at most {rates['highest']:.4g}" if rates["highest"] > max(rates["first"], self.learning_rate) else ""
        return f"from {rates['first']:.4g} to {self.learning_rate:.4g}{between}, mean {rates['mean']:.4g}"

    def _score_lines(self, datasets: Sequence[str]) -> list[str]:
        """One line for training and one for all evaluations."""

        def scores_of(dataset: str) -> str:
            start = f"{dataset}_loss_"
            return text({name.removeprefix(start): value for name, value in self.scores.items() if name.startswith(start)})

        total = self.seconds_before + sum(self.seconds[0].values()) if self.seconds else self.elapsed
        lines = [f"epoch {self.epoch} score: {scores_of('train')}, elapsed: {clock_text(total)}"]
        evaluations = "; ".join(f"{dataset}: {scores_of(dataset)}" for dataset in datasets)
        return lines + ([f"epoch {self.epoch} evaluation: {evaluations}"] if evaluations else [])


@dataclass(frozen=True)
class EvaluationReport:
    """The results of an evaluation within an epoch.

    Attributes:
        step: completed steps of the epoch.
        global_step: completed steps of the whole training.
        progress: the share of the epoch that is done, from 0 to 1.
        learning_rate: the epoch's rate before a per-step rule is applied.
        scores: by name, such as 'dev_loss_ce'.
        elapsed: seconds since the epoch began, without evaluations and those between a stop and a resume.
        seconds: that the evaluation took.
        losses: as in `EpochReport`.
    """

    epoch: int
    step: int
    global_step: int
    progress: float
    learning_rate: float
    scores: Mapping[str, float]
    elapsed: float
    seconds: float
    losses: Mapping[str, float] = field(default_factory=dict)

    def line(self, datasets: Sequence[str]) -> str:
        """The log line. `datasets`: the names of the evaluated datasets."""
        texts = []
        for dataset in datasets:
            start = f"{dataset}_loss_"
            scores = {name.removeprefix(start): value for name, value in self.scores.items() if name.startswith(start)}
            texts.append(f"{dataset}: {text(scores)}")
        return (
            f"epoch {self.epoch} evaluation after step {self.step} ({self.progress:.1%}): {'; '.join(texts)}, "
            f"in {clock_text(self.seconds)}"
        )


EvaluationReceiver = Callable[[EvaluationReport], None]
"""Receives the report of an evaluation within an epoch on rank 0, between two steps, so it has to be fast."""


class Reporter(Protocol):
    """Receives the report on every finished epoch."""

    def epoch(self, report: EpochReport) -> None: ...


FEW_RANKS = 8
"""In a job of at most this many ranks, as on one host, the log and TensorBoard show each of them."""


def seconds_lines(seconds: Sequence[Mapping[str, float]]) -> list[str]:
    """The ranks' seconds by activity: one line per rank if there are few, else the median and the slowest rank.

    >>> seconds_lines([{"compute": 8.25, "rest": 1}, {"compute": 7, "rest": 2.25}])
    ['rank 0: compute 8.2, rest 1.0', 'rank 1: compute 7.0, rest 2.2']
    >>> for line in seconds_lines([{"data wait": 0.1, "compute": 8.0}] * 99 + [{"data wait": 3.0, "compute": 8.1}]):
    ...     print(line)
    median of 100 ranks: data wait 0.1, compute 8.0
    slowest, rank 99: data wait 3.0, compute 8.1; waiting for data took 2.9 s longer than usual
    """
    if len(seconds) <= FEW_RANKS:
        return [f"rank {number}: {_seconds_text(rank)}" for number, rank in enumerate(seconds)]
    usual = _medians(seconds)
    slowest = _slowest(seconds)
    cause = max(OWN_WORK, key=lambda name: seconds[slowest].get(name, 0.0) - usual.get(name, 0.0))
    longer = seconds[slowest].get(cause, 0.0) - usual.get(cause, 0.0)
    return [
        f"median of {len(seconds)} ranks: {_seconds_text(usual)}",
        f"slowest, rank {slowest}: {_seconds_text(seconds[slowest])}; {OWN_WORK[cause]} took {longer:.1f} s longer than usual",
    ]


def _seconds_text(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05) or "0.0 in all"


def _medians(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in seconds for name in rank)
    return {name: median(rank.get(name, 0.0) for rank in seconds) for name in names}


def _slowest(seconds: Sequence[Mapping[str, float]]) -> int:
    """The rank that took longest for its own work."""
    return max(range(len(seconds)), key=lambda rank: own_seconds(seconds[rank]))


OWN_WORK = {"data wait": "waiting for data", "compute": "computing"}
"""Activities of a rank in a training step that involve no other rank, with their names in the log."""

COLLECTIVES = ("communication", "parameter sync")
"""Activities in which a rank waits for the others."""

MIN_SHARE = 0.15
"""A rank is reported if it takes longer than the others by this share. Random batch lengths explain smaller differences."""

MIN_SECONDS = 0.2
"""It also has to take this many seconds longer: the times of a short epoch are mostly noise."""


def straggler_line(seconds: Sequence[Mapping[str, float]]) -> str | None:
    """A line about the slowest rank: how long the others waited for it, and whether reading data or computing is the cause.

    Args:
        seconds: for every rank, seconds of an epoch by activity.

    Returns:
        None if no rank held up the others.

    >>> straggler_line([{"compute": 8.0, "communication": 3.1}, {"compute": 11.0, "communication": 0.1}])
    'rank 1 held the others up by 3.0 s (38%): computing took 11.0 s, against 8.0 s'
    >>> straggler_line([{"compute": 8.0, "communication": 0.2}, {"compute": 8.3, "communication": 0.1}])
    """
    slowest = straggler(seconds)
    if slowest is None:
        return None
    typical = {
        name: median(rank.get(name, 0.0) for number, rank in enumerate(seconds) if number != slowest.rank) for name in OWN_WORK
    }
    times = seconds[slowest.rank]
    cause = max(OWN_WORK, key=lambda name: times.get(name, 0.0) - typical[name])
    return (
        f"rank {slowest.rank} held the others up by {slowest.late:.1f} s ({slowest.share:.0%}): {OWN_WORK[cause]} took "
        f"{times.get(cause, 0.0):.1f} s, against {typical[cause]:.1f} s"
    )


@dataclass(frozen=True)
class Straggler:
    """A rank that held up the others.

    Attributes:
        late: seconds that it took longer than the median of the others.
        share: the same as a share of their time.
    """

    rank: int
    late: float
    share: float


def straggler(seconds: Sequence[Mapping[str, float]]) -> Straggler | None:
    """The rank that held up the others in an epoch, if any. The argument is that of `straggler_line`."""
    if len(seconds) < 2:
        return None
    own_work = [own_seconds(rank) for rank in seconds]
    slowest = _slowest(seconds)
    others = [rank for number, rank in enumerate(seconds) if number != slowest]
    usual = median(time for number, time in enumerate(own_work) if number != slowest)
    late = own_work[slowest] - usual
    # The slowest rank arrives last, so it hardly waits itself: only if the others waited for it, it is the cause.
    waited = median(_waiting(rank) for rank in others) - _waiting(seconds[slowest])
    if late < MIN_SECONDS or late < MIN_SHARE * usual or waited < late / 2:
        return None
    return Straggler(slowest, late, late / usual if usual else 0.0)


def own_seconds(rank: Mapping[str, float]) -> float:
    """Seconds that a rank spent on its own work: computing and waiting for data."""
    return sum(rank.get(name, 0.0) for name in OWN_WORK)


def _waiting(rank: Mapping[str, float]) -> float:
    """Seconds that a rank spent in collectives."""
    return sum(rank.get(name, 0.0) for name in COLLECTIVES)
