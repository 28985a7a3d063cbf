"""The loop: epochs, steps, evaluation, saving. Sees contracts only: no tensor, no launcher, no file format."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.checkpoint import CheckpointFolder
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan import Plan
from hvdtrain.errors import DataError
from hvdtrain.learner.base import Learner
from hvdtrain.log import say
from hvdtrain.reduce import Reducer
from hvdtrain.report.epoch import EpochReport, Reporter
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.scores import Scores, text
from hvdtrain.timer import Timer, clock_text
from hvdtrain.watchdog import Watchdog


@dataclass(frozen=True)
class Rates:
    """The learning rate: `of_epoch(epoch, history)` before an epoch, `of_step(step, epoch_continuous, epoch_rate)` in it.

    `of_step` gives the rate that the optimizer gets, scaled by the number of ranks where that was asked for.
    """

    of_epoch: Callable[[int, list[EpochRecord]], float]
    of_step: Callable[[int, float, float], float]


class Engine:
    """Trains from one epoch to another. All ranks run it alike, in step.

    Args:
        evaluations: datasets that are evaluated after every epoch.
        history: the epochs that are already done; step: the updates they took.
        log_interval: seconds between two log lines within an epoch.
    """

    def __init__(
        self,
        comm: Communicator,
        learner: Learner,
        reducer: Reducer,
        train: Feed,
        evaluations: list[Feed],
        rates: Rates,
        checkpoints: CheckpointFolder,
        reporters: list[Reporter],
        timer: Timer,
        watchdog: Watchdog,
        *,
        history: list[EpochRecord],
        step: int,
        num_epochs: int,
        log_interval: float,
    ) -> None:
        self._comm = comm
        self._learner = learner
        self._reducer = reducer
        self._train = train
        self._evaluations = evaluations
        self._rates = rates
        self._checkpoints = checkpoints
        self._reporters = reporters
        self._timer = timer
        self._watchdog = watchdog
        self._history = history
        self._step = step
        self._num_epochs = num_epochs
        self._log_interval = log_interval

    def run(self) -> None:
        """Train up to the last epoch."""
        first = self._history[-1].epoch + 1 if self._history else 1
        for epoch in range(first, self._num_epochs + 1):
            self._run_epoch(epoch)
        say(3, f"Finished training in epoch {self._num_epochs}.")

    def _run_epoch(self, epoch: int) -> None:
        """Train, evaluate, save and report one epoch."""
        self._timer.take()
        started = time.perf_counter()
        epoch_rate = self._rates.of_epoch(epoch, self._history)
        plan = together(self._comm, lambda: self._train.plan(epoch), name="plan_train")
        effective = self._rates.of_step(self._step, epoch - 1.0, epoch_rate)
        say(4, f"start epoch {epoch} global train step {self._step} with effective learning rate {effective:.6g} ...")

        first_step = self._step
        scores = {f"train_loss_{name}": mean for name, mean in self._train_epoch(epoch, plan, epoch_rate).items()}
        elapsed = time.perf_counter() - started
        # Steps as the device saw them, collectives included, and the averaging of parameters between them.
        computing = self._learner.take_step_seconds() + self._timer.seconds.get("parameter sync", 0.0)

        for feed in self._evaluations:
            with self._timer.span("evaluation"):
                scores |= {f"{feed.name}_loss_{name}": mean for name, mean in self._evaluate(epoch, feed).items()}

        self._history.append(EpochRecord(epoch, epoch_rate, scores))
        with self._timer.span("saving"):
            self._save(epoch)
        report = EpochReport(
            epoch=epoch,
            steps=self._step - first_step,
            global_step=self._step,
            elapsed=elapsed,
            computing=computing / elapsed,
            learning_rate=epoch_rate,
            num_sequences=self._train.num_sequences(plan),
            scores=scores,
            padding=plan.padding(self._train.lengths),
            seconds=self._comm.gather(self._seconds(time.perf_counter() - started), name="seconds"),
        )
        for level, line in report.lines([feed.name for feed in self._evaluations]):
            say(level, line)
        for reporter in self._reporters:
            reporter.epoch(report)

    def _train_epoch(self, epoch: int, plan: Plan, epoch_rate: float) -> dict[str, float]:
        """Collective. All steps of an epoch; returns the mean losses over all ranks."""
        share = self._train.share(plan)
        counts = self._agree_on_rounds(plan, len(share))
        rounds = max(counts)
        started = last_line = time.perf_counter()
        scores: list[Scores] = []
        self._learner.begin_epoch(epoch, self._step)
        with self._train.read(share) as batches:
            for done in range(rounds):
                self._watchdog.beat(f"epoch {epoch}, step {done}")
                with self._timer.span("data wait"):
                    batch = next(batches, None)
                with self._timer.span("compute"):
                    self._learner.backward(batch)
                    self._learner.update(self._rates.of_step(self._step, epoch - 1 + done / rounds, epoch_rate))
                self._reducer.after_update(self._learner, batch is not None, sum(count > done for count in counts))
                self._step += 1
                now = time.perf_counter()
                if now - last_line >= self._log_interval and self._comm.rank == 0:
                    last_line = now
                    scores.append(self._learner.take_scores())
                    say(5, step_line(epoch, done + 1, rounds, scores[-1], now - started))
        self._reducer.end_of_epoch(self._learner)
        scores.append(self._learner.take_scores())
        return Scores.merged(self._comm.gather(Scores.merged(scores), name="train_scores")).means()

    def _agree_on_rounds(self, plan: Plan, own: int) -> list[int]:
        """Collective. How many batches each rank has. Once an epoch; makes sure that all planned the same epoch."""
        answers = self._comm.gather((own, plan.fingerprint()), name="plan")
        if self._train.distribution == "shard":
            others = [rank for rank, (_, fingerprint) in enumerate(answers) if fingerprint != answers[0][1]]
            if others:
                error = DataError(
                    f"{self._train.name}: expected the same sequences on all ranks, got others on rank {others[0]} "
                    "(are the files the same on all hosts?)"
                )
                error.on_every_rank = True
                raise error
        return [count for count, _ in answers]

    def _evaluate(self, epoch: int, feed: Feed) -> dict[str, float]:
        """Collective. The exact mean losses and errors over a whole dataset, dealt out to the ranks."""
        share = feed.share(together(self._comm, lambda: feed.plan(epoch), name=f"plan_{feed.name}"))
        with feed.read(share) as batches:
            for number, batch in enumerate(batches):
                self._watchdog.beat(f"epoch {epoch}, evaluation of {feed.name}, batch {number}")
                self._learner.evaluate(batch)
        parts = self._comm.gather(self._learner.take_scores(), name=f"scores.{feed.name}")
        return Scores.merged(parts).means()

    def _save(self, epoch: int) -> None:
        """Collective. Rank 0 writes the checkpoint; where it fails, all ranks fail."""
        self._watchdog.beat(f"epoch {epoch}, saving")
        progress: dict[str, Any] = {"epoch": epoch, "step": self._step, "history": [asdict(record) for record in self._history]}

        def write() -> str:
            saved = self._checkpoints.save(epoch, lambda model, optimizer: self._learner.save(model, optimizer, progress))
            return str(saved.model_file)

        say(4, f"Save model under {on_rank_zero(self._comm, write, name='save')}")

    def _seconds(self, total: float) -> dict[str, float]:
        """Where this rank's time went since the epoch began."""
        seconds = self._timer.take()
        return {**seconds, "rest": total - sum(seconds.values())}


def step_line(epoch: int, done: int, rounds: int, scores: Scores, elapsed: float) -> str:
    """A line about the steps since the last one, in RETURNN's words."""
    remaining = elapsed / done * (rounds - done)
    return (
        f"train epoch {epoch}, step {done}, {text(scores.means())}, {elapsed / done:.3f} sec/step, "
        f"elapsed {clock_text(elapsed)}, exp. remaining {clock_text(remaining)}, complete {done / rounds:.2%}"
    )
