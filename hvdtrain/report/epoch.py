"""The report on a finished epoch, and its log lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvdtrain.data.files import size_text
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text

FEW_SKIPPED = 5
FEW_SKIPPED_SHARE = 0.02
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

    def score_lines(self, datasets: Sequence[str]) -> list[str]:
        """One line for training and one for all evaluations, which programs read.

        Args:
            datasets: names of the evaluated datasets.
        """
        total = self.seconds_before + sum(self.seconds[0].values()) if self.seconds else self.elapsed
        lines = [f"epoch {self.epoch} score: {_scores_of(self.scores, 'train')}, elapsed: {clock_text(total)}"]
        evaluations = "; ".join(f"{dataset}: {_scores_of(self.scores, dataset)}" for dataset in datasets)
        return lines + ([f"epoch {self.epoch} evaluation: {evaluations}"] if evaluations else [])

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
        texts = [f"{dataset}: {_scores_of(self.scores, dataset)}" for dataset in datasets]
        return (
            f"epoch {self.epoch} evaluation after step {self.step} ({self.progress:.1%}): {'; '.join(texts)}, "
            f"in {clock_text(self.seconds)}"
        )


def _scores_of(scores: Mapping[str, float], dataset: str) -> str:
    start = f"{dataset}_loss_"
    return text({name.removeprefix(start): value for name, value in scores.items() if name.startswith(start)})


EvaluationReceiver = Callable[[EvaluationReport], None]
"""Receives the report of an evaluation within an epoch on rank 0, between two steps, so it has to be fast."""


class Reporter(Protocol):
    """Receives the report on every finished epoch."""

    def epoch(self, report: EpochReport) -> None: ...


FEW_RANKS = 8
"""In a job of at most this many ranks, as on one host, the log and TensorBoard show each of them."""
