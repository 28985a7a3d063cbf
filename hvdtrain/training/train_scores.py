"""The scores of an epoch's training, which the ranks gather at its end and before a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Batch
from hvdtrain.errors import HvdtrainError
from hvdtrain.learner.base import Learner, NotFinite
from hvdtrain.runtime import log
from hvdtrain.runtime.scores import Scores
from hvdtrain.training.account import Account
from hvdtrain.training.evaluation import not_finite_error
from hvdtrain.training.step_log import ScoreBuffer


class TrainScores:
    """This rank's scores that have not been gathered yet, the sequences that they cover, and losses that are not finite.

    Args:
        needs_finite: whether a loss that is not finite ends the training.

    Attributes:
        buffer: the scores, which lines about steps also use.
    """

    def __init__(self, comm: Communicator, learner: Learner, needs_finite: bool) -> None:
        self._comm = comm
        self._learner = learner
        self._needs_finite = needs_finite
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
        self._feed.broken.add(batch.broken)
        self._left_out += len(batch.broken)

    def is_broken(self) -> bool:
        """Whether a loss of this rank that has arrived ends the training."""
        self._not_finite += self._learner.meter.take_not_finite()
        return self._needs_finite and bool(self._not_finite)

    def gather(self, current: EpochProgress) -> None:
        """Collective. Add the ranks' scores since the last call to the epoch's.

        Raises:
            TrainingError: a loss is not a finite number, or too many updates in a row were skipped.
            DataError: the ranks did not train on exactly what was planned.
        """
        self._learner.flush()
        splits = self._learner.meter.take_splits()
        broken = self._left_out, self._feed.broken.take()
        self._left_out = 0
        own = self.buffer.take_all(), self.is_broken(), splits, broken, self._account.take(current.position)
        gathered = self._comm.gather(own, name="train_scores")
        if not current.scores.counts():
            current.initial = Scores.merge(scores for scores, *_ in gathered).first()
        current.scores = Scores.merge([current.scores, *(scores for scores, *_ in gathered)]).compact()
        current.splits += sum(number for _, _, number, *_ in gathered)
        if any(is_broken for _, is_broken, *_ in gathered):
            raise self.not_finite_error(current)
        current.left_out += sum(left_out for *_, (left_out, _), _ in gathered)
        for line in self._feed.broken.merge([found for *_, (_, found), _ in gathered]):
            log.warning(line)
        self._account.check(f"epoch {current.epoch}", [used for *_, used in gathered])

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
