"""The scores of an epoch's training, which the ranks gather at its end and before a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Batch, Broken
from hvdtrain.errors import HvdtrainError, TrainingError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.meter import NotFinite
from hvdtrain.learner.precision import Updates
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import Scores
from hvdtrain.training.account import Account, Entry
from hvdtrain.training.evaluation import not_finite_error
from hvdtrain.training.step_log import ScoreBuffer


@dataclass(frozen=True)
class _RankScores:
    """What a rank tells the others at the end of an epoch and before a checkpoint, since the last time.

    Attributes:
        initial: the means of its first batch, if these are the first scores of the epoch.
        is_broken: whether a loss that is not finite ends the training.
        splits: the number of batches that were split.
        updates: those that were checked.
        broken: the number of broken sequences, and those that are new.
    """

    scores: Scores
    initial: Mapping[str, float]
    is_broken: bool
    splits: int
    updates: Updates
    broken: tuple[int, list[Broken]]
    used: Entry


class TrainScores:
    """This rank's scores that have not been gathered yet, the sequences that they cover, and losses that are not finite.

    Args:
        needs_finite: whether a loss that is not finite ends the training.
        are_alike: whether all ranks apply the same updates.

    Attributes:
        buffer: the scores, which lines about steps also use.
    """

    def __init__(self, comm: Communicator, learner: Learner, needs_finite: bool, are_alike: bool) -> None:
        self._comm = comm
        self._learner = learner
        self._needs_finite = needs_finite
        self._are_alike = are_alike
        self._not_finite: list[NotFinite] = []

    def begin(self, feed: Feed, plan: Plan, position: int) -> None:
        """Begin the steps of an epoch, or resume them at a position of its plan."""
        self._feed = feed
        self.buffer = ScoreBuffer(self._learner.meter)
        self._account = Account(self._feed, plan, position)
        self._left_out = 0  # broken sequences of the epoch since the last call of `gather`

    def add(self, batch: Batch) -> None:
        """Count a batch that this rank trains on, and its broken sequences. Raises: BrokenSequence, if there are too many."""
        self._account.add(batch.planned)
        if batch.broken:
            self._feed.broken.add(batch.broken)
            self._left_out += batch.left_out

    def take_not_finite(self) -> bool:
        """Take up the losses of this rank that have arrived; return whether one of them ends the training."""
        self._not_finite += self._learner.meter.take_not_finite()
        return self._needs_finite and bool(self._not_finite)

    def gather(self, current: EpochProgress) -> None:
        """Collective. Add the ranks' scores since the last call to the epoch's.

        Raises:
            TrainingError: a loss is not a finite number, or too many updates in a row were skipped.
            DataError: the ranks did not train on exactly what was planned.
        """
        self._learner.flush()
        broken = self._left_out, self._feed.broken.take()
        self._left_out = 0
        scores = self.buffer.take_all()
        is_first = not current.scores.counts()
        rank_scores = _RankScores(
            scores=scores.compact(),  # a number for every step of every rank would fill the memory of each of a thousand ranks
            initial=scores.first() if is_first else {},
            is_broken=self.take_not_finite(),
            splits=self._learner.meter.take_splits(),
            updates=self._learner.meter.take_updates(),
            broken=broken,
            used=self._account.take(current.position),
        )
        gathered = self._comm.gather(rank_scores, name="train_scores")
        if is_first:
            initial: dict[str, float] = {}
            for theirs in reversed(gathered):  # a loss counts on the first rank that has it
                initial |= theirs.initial
            current.initial = dict(sorted(initial.items()))
        current.scores = Scores.merge([current.scores, *(theirs.scores for theirs in gathered)]).compact()
        for theirs in gathered[:1] if self._are_alike else gathered:
            current.updated += theirs.updates.applied
            current.skipped += theirs.updates.skipped
        current.splits += sum(theirs.splits for theirs in gathered)
        if any(theirs.is_broken for theirs in gathered):
            raise self.not_finite_error(current)
        current.left_out += sum(theirs.broken[0] for theirs in gathered)
        for line in self._feed.broken.merge([theirs.broken[1] for theirs in gathered]):
            log.warning(line)
        self._account.check(f"epoch {current.epoch}", [theirs.used for theirs in gathered])

    def not_finite_error(self, current: EpochProgress) -> HvdtrainError:
        """Collective. The error with the losses of all ranks that are not finite."""
        return not_finite_error(self._comm, self._feed.dataset, self._not_finite, current.epoch, current.first_step)


def note_missing_parts(feed: Feed, counts: Mapping[str, float]) -> None:
    """Log which losses have no scores of the datasets of a mix.

    Args:
        counts: by name of a score, the number of its elements.
    """
    if feed.dataset.mix is None:
        return
    endings = tuple(f".{name}" for name in feed.dataset.mix.names)
    losses = [name for name in counts if not name.endswith(endings)]
    missing = [name for name in losses if not any(f"{name}{ending}" in counts for ending in endings)]
    if missing:
        log.info(
            f"{feed.name}: no score of each dataset for {', '.join(missing)}: pass seq_lens=... to mark_as_loss, the number of "
            "elements of each sequence (docs/datasets.md)"
        )


def check_elements(scores: Scores) -> None:
    """Raises: TrainingError on all ranks, if no batch of an epoch had an element to learn from."""
    minimized = scores.scales()
    if minimized and not any(scores.counts().get(name) for name in minimized):
        raise TrainingError(
            f"train_step: expected losses with elements, got none in the whole first epoch for {', '.join(minimized)} "
            "(is each mask or selection empty?)"
        ).on_all_ranks()


def warn_of_means(counts: Mapping[str, float], num_batches: int, num_sequences: int) -> None:
    """Warn about losses that are one number per batch, since batches of different sizes then have the same weight.

    Args:
        counts: by name of a loss, the number of its elements in an epoch of this many batches and sequences.
    """
    for name, count in counts.items():
        if count == num_batches < num_sequences:
            log.warning(
                f"{name}: train_step marks one number per batch; mark one per element (reduction='none'), so that the result "
                "does not depend on the batches and on the number of ranks",
            )
