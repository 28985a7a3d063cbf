"""Writing a checkpoint of a training that runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from hvdtrain.data.feed import Feed, check_files
from hvdtrain.learner.drift import check_weights
from hvdtrain.training.callbacks import Training
from hvdtrain.training.epoch import EpochClock
from hvdtrain.training.notifier import Notifier
from hvdtrain.training.session import Session
from hvdtrain.training.train_scores import TrainScores


class Saving:
    """Writes checkpoints between two steps, or after an epoch.

    Args:
        training: what the callbacks see.
    """

    def __init__(
        self,
        session: Session,
        scores: TrainScores,
        clock: EpochClock,
        training: Training,
        notifier: Notifier,
    ) -> None:
        self._session = session
        self._scores = scores
        self._clock = clock
        self._training = training
        self._notifier = notifier

    def save(self, feeds: Sequence[Feed], is_end: bool = False) -> None:
        """Collective. Write a checkpoint; one within an epoch includes the epoch's scores and seconds so far.

        Args:
            is_end: whether the training ends with it.

        Raises:
            DataError: a file of `feeds` was changed, perhaps before the model was trained on it; nothing is written.
            ConfigError: the ranks have other weights than rank 0, although they make the same updates; nothing is written.
        """
        session = self._session
        progress = self._session.progress
        with session.timer.span("saving"):
            current = progress.current
            if current is not None and not current.trained:
                self._clock.count(current)  # first, as it waits for the steps that a GPU still computes
                self._scores.gather(current)
            self.compare_weights()
            progress.spent = session.goodput.state(is_end)
            expect_wait(session)
            ranks = session.saver.prepare(partial(check_files, feeds))
            session.watchdog.beat(f"step {progress.step}, saving", "saving")
            began = time.monotonic()
            checkpoint = session.saver.save(progress, ranks)
            session.interrupt.seconds_to_save = time.monotonic() - began
        session.goodput.count_save()
        session.watchdog.beat(f"step {progress.step}, after saving", "between")
        if checkpoint is not None:
            self._training.checkpoint = checkpoint.model_file
            self._notifier.notify("on_save")

    def compare_weights(self) -> None:
        """Collective, where all ranks make the same updates. Raises: ConfigError, if their weights differ."""
        session = self._session
        if session.comm.size > 1 and session.reducer.gradients.keeps_ranks_alike:
            facts = {"the learning rate": repr(self._training.learning_rate)}
            with session.learner.state.trained_weights():  # the model may have those of an evaluation
                check_weights(session.comm, session.learner.state, facts)


def await_checkpoint(session: Session) -> None:
    """Collective. Wait for a checkpoint that is written in the background."""
    expect_wait(session)
    session.saver.finish()


def expect_wait(session: Session) -> None:
    """Tell the watchdog that a checkpoint may still be written in the background."""
    session.watchdog.beat(f"step {session.progress.step}, waiting for the checkpoint before", "finishing")
