"""The contract of savers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.learner.reducer import Numbers

ALIKE = "alike"
"""The entry of a checkpoint with the lowest rank that has the same model and optimizer, for each rank."""


@dataclass(frozen=True)
class RankState:
    """What a checkpoint says of a rank.

    Attributes:
        reducer: the state of its reducer.
        save_id: a new mark for the files of a checkpoint, of which that of rank 0 is used.
        alike: the lowest rank that has the same model and optimizer.
    """

    reducer: Numbers
    save_id: str
    alike: int


class SaverBase:
    """What a training asks of a saver. This one saves nothing, for a dry run."""

    def prepare(self, check: Callable[[], object]) -> list[RankState]:
        """Collective. Wait until everything is written; return what the next checkpoint says of the ranks.

        Args:
            check: called on every rank; raises an HvdtrainError if nothing may be written.

        Raises:
            CheckpointError: the checkpoint before could not be written.
        """
        return []

    def save(self, progress: Progress, ranks: Sequence[RankState]) -> Checkpoint | None:
        """Collective. Write a checkpoint, within `trained_weights`. If one rank fails, all fail; with a background writer, at the
        next save or at the end.

        Args:
            ranks: what `prepare` has just returned.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        return None

    def save_evaluated(self, progress: Progress) -> Checkpoint | None:
        """Collective. After an evaluation within an epoch, write the model, without its optimizer, if it is one of those to keep,
        and remove those that no longer are.

        Raises:
            CheckpointError: the disk is full, or the folder cannot be written to.
        """
        return None

    def finish(self) -> None:
        """Collective. Wait for a checkpoint that is being written in the background. Raises: CheckpointError."""
