"""The ranks' part of a run: train some steps with the real engine, on given global batches, and record the results.

The run with the most ranks uses the batches of its normal plan. A step's batches on all of these ranks are a global batch; with
fewer ranks, the same sequences form fewer, larger batches. A run trains the first steps of the epoch, writes a checkpoint, is
opened again from it, and trains the last steps, at their places in the epoch, with their learning rates.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, TypeVar

import numpy

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver_base import RankState, SaverBase
from hvdtrain.comm.base import Communicator
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array
from hvdtrain.engine import Engine
from hvdtrain.errors import DataError
from hvdtrain.plugins.prove.causes import disable_dropout, find_parts, probe
from hvdtrain.plugins.prove.compare import Losses, Record, checksum, sketch, sum_losses
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime.log import silence
from hvdtrain.settings import Settings
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.limits import open_limits, open_rates
from hvdtrain.start_up.ranks import open_communicator
from hvdtrain.start_up.without_files import writing_nothing
from hvdtrain.training.limits import Rates, TrainingLimits
from hvdtrain.training.session import Session
from hvdtrain.training.step_log import StepLog, StepReport

BATCHES = "batches"
"""The file with the global batches."""


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of an epoch, and which of its steps are trained.

    Attributes:
        plan: batch i is that of rank i % ranks in step i // ranks; in the last step, some ranks may have none.
        ranks: the number of ranks that the batches were made for.
        begin: the number of steps at the beginning of the epoch, after which the training is stopped and resumed.
        end: the number of steps at the end of the epoch, with which it continues. Those in between are left out.
    """

    plan: Plan
    ranks: int
    begin: int
    end: int

    @property
    def steps(self) -> int:
        """The number of steps in the epoch."""
        return -(-self.plan.num_batches // self.ranks)

    def deal(self, size: int) -> Plan:
        """Distribute the sequences of each step over N batches; in the last step, over at most as many as there are sequences."""
        if size == self.ranks:
            return self.plan
        ends = numpy.append(self.plan.bounds[: -1 : self.ranks], self.plan.bounds[-1])
        counts = numpy.diff(ends)
        cuts = ends[:-1, None] + numpy.arange(size) * counts[:, None] // size
        last = ends[-2] + numpy.arange(min(size, counts[-1])) * counts[-1] // min(size, counts[-1])
        return Plan(self.plan.order, numpy.concatenate([cuts[:-1].reshape(-1), last, ends[-1:]]).astype(numpy.int64))


def choose_steps(plan: Plan, ranks: int, steps: int) -> GlobalBatches:
    """The first and the last steps of an epoch.

    Raises:
        DataError: no step has a batch for each rank; on all ranks alike.
    """
    if plan.num_batches < ranks:
        raise DataError(
            f"train: expected at least {ranks} batches in an epoch for {ranks} ranks, got {plan.num_batches} "
            "(smaller max_seqs or batch_size, or fewer --ranks)"
        ).on_all_ranks()
    updates = min(steps, -(-plan.num_batches // ranks))
    return GlobalBatches(plan, ranks, updates - updates // 2, updates // 2)


@dataclass(frozen=True)
class Task:
    """The task of a run, passed to its ranks in a file.

    Attributes:
        folder: for all written files: the records and, from the first run, the global batches.
        name: the name of the record.
        dropout: whether to leave it on.
        diagnose: the records of runs that differ, by name: one rank repeats each of them, batch after batch, and finds out
            whether the model draws random numbers.
    """

    folder: Path
    name: str
    steps: int
    dropout: bool = True
    diagnose: Sequence[str] = ()


def written(path: Path) -> Any:
    """What this command has pickled into a file of its temporary folder."""
    return pickle.loads(path.read_bytes())


def run_task(settings: Settings, task: Task) -> None:
    """Collective. Execute a task. Raises: HvdtrainError."""
    settings = proof_settings(settings, task)
    if not task.diagnose:
        train(settings, task, task.name)
        return
    for name in task.diagnose:
        train(settings, task, f"{task.name}-{name}", accumulated=written(task.folder / name))
    probed = probe(settings, written(task.folder / BATCHES).plan.batch(0), task.dropout, task.folder)
    (task.folder / task.name).write_bytes(pickle.dumps(probed))


def proof_settings(settings: Settings, task: Task) -> Settings:
    """The settings for a training that starts anew, on the training data only, and writes nothing into the user's folders."""
    settings = writing_nothing(settings)
    start = settings.start
    if start.load is None:  # the folder is new, so there is nothing to continue from
        start = replace(start, start_epoch="auto", load_epoch=None)
    return replace(
        settings,
        log=replace(settings.log, log_verbosity=0),
        start=start,
        datasets=settings.datasets[:1],
    )


class StopTraining(Exception):
    """Stops the training on all ranks, once a checkpoint is written."""


class StoppingSaver(SaverBase):
    """Writes one checkpoint within the epoch, then stops the training."""

    def __init__(self, inner: SaverBase) -> None:
        self._inner = inner

    def prepare(self, check: Callable[[], object]) -> list[RankState]:
        return self._inner.prepare(check)

    def save(self, progress: Progress, ranks: Sequence[RankState]) -> None:
        if progress.current is not None:
            self._inner.save(progress, ranks)
            self._inner.finish()
            raise StopTraining


def train(settings: Settings, task: Task, name: str, accumulated: Record | None = None) -> None:
    """Collective. Train the first steps of an epoch, stop, resume in the last ones, and write the record.

    Args:
        accumulated: train on the batches of this run's ranks one after another, with its learning rates.
    """
    settings = replace(settings, run=replace(settings.run, model=str(task.folder / "models" / name)))
    per_step = 1 if accumulated is None else accumulated.size  # batches that a rank takes for one step
    with open_communicator(settings) as comm, silence():
        recorder = Recorder(comm)

        def train_epoch(session: Session, save_steps: int | None, progress: Progress, saver: SaverBase) -> bool:
            """Train until the end of the epoch, or until the saver stops it; return whether it did."""
            if not task.dropout:
                disable_dropout(session.learner)
            [train, *_] = session.epochs.feeds(session.feeds, session.progress.epoch + 1)
            feed = replace(train, distribution="shard", only=batches.deal(comm.size * per_step))
            recorder.learner = session.learner
            session.learner.observer = recorder.record_gradients
            limits = _limits_of(settings, session, save_steps)
            rates = open_rates(settings, comm.size, session.epochs)
            if accumulated is not None:
                limits = _accumulate_ranks(limits, accumulated.size)
                rates = fixed_rates(accumulated.rates, lambda: recorder.updates)
            opened = replace(session, feeds=[feed], saver=saver, progress=progress)
            try:
                Engine(opened, rates, limits, Reporters(), recorder, [recorder.record_weights]).run()
            except StopTraining:
                return True
            return False

        with open_session(settings, "dry_run", comm) as session:
            batches = _global_batches(session, task)
            fresh = Progress(session.progress.step, session.progress.epoch, list(session.progress.history))
            is_stopped = train_epoch(session, fresh.step + batches.begin * per_step, fresh, StoppingSaver(session.saver))
        if is_stopped:
            with open_session(settings, "dry_run", comm) as session:  # loads model, optimizer and position
                _skip(session.progress, batches, comm.size, per_step)
                train_epoch(session, None, session.progress, SaverBase())
        record = recorder.record(per_step)
        if comm.rank == 0:
            (task.folder / name).write_bytes(pickle.dumps(record))


def _limits_of(settings: Settings, session: Session, save_steps: int | None) -> TrainingLimits:
    limits = replace(open_limits(settings, session.epochs), num_epochs=session.progress.epoch + 1, save_minutes=None)
    return replace(limits, save_steps=save_steps, ends_early=lambda _: None, mistake=lambda _: None)


def _skip(progress: Progress, batches: GlobalBatches, size: int, per_step: int) -> None:
    """Skip to the last steps of the epoch, unless the training was stopped within them."""
    current = progress.current
    if current is None:
        return
    ranks = size * per_step
    skipped = batches.steps - batches.end - current.position // ranks
    if skipped > 0:
        current.position += skipped * ranks
        progress.step += skipped * per_step


def _global_batches(session: Session, task: Task) -> GlobalBatches:
    """Collective. Read the global batches that the first run has written; the first run chooses and writes them."""
    path = task.folder / BATCHES
    comm = session.comm
    epoch = session.progress.epoch + 1
    if comm.gather(path.exists(), name="prove.batches")[0]:
        batches: GlobalBatches = written(path)
        return batches
    [feed, *_] = session.epochs.feeds(session.feeds, epoch)
    batches = choose_steps(replace(feed, distribution="shard").plan(epoch), comm.size, task.steps)
    if comm.rank == 0:
        path.write_bytes(pickle.dumps(batches))
    return batches


def _accumulate_ranks(limits: TrainingLimits, size: int) -> TrainingLimits:
    """The limits for one rank that takes N ranks' batches one after another for each of their steps."""
    rounds = limits.steps_per_update
    return replace(limits, steps_per_update=lambda epoch, complete, step: size * rounds(epoch, complete, step // size))


def fixed_rates(rates: Sequence[float], updates: Callable[[], int]) -> Rates:
    """Given learning rates, one for each update, no matter how often the engine asks.

    Args:
        updates: returns the number of updates done so far.
    """
    return Rates(lambda epoch, progress: rates[0], lambda step, complete, epoch_rate: rates[min(updates(), len(rates) - 1)])


class Recorder(StepLog):
    """Records a training: as the engine's step log and trace, and as the learner's observer.

    Attributes:
        learner: the current session's learner.
        updates: the number of updates done so far.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self.learner: Any = None
        self._step_losses: list[Losses] = []
        self._data: list[int] = []
        self._num_sequences: list[int] = []
        self._rates: list[float] = []
        self._weights: dict[str, list[Array]] = {}
        self._gradients: dict[str, list[Array]] = {}
        self._elements: dict[str, int] = {}
        self.updates = 0
        self._weighed = -1  # the number of updates after which the weights were last recorded

    def record_weights(self, epoch: int, step: int, indices: Array) -> None:
        """Called before each step: record the weights, once after each update."""
        if self._comm.rank == 0 and self._weighed < self.updates:
            self._weighed = self.updates
            self._add(self.learner.state.named_parameters(), self._weights)

    def record_gradients(self, gradients: Iterable[tuple[str, Array]]) -> None:
        """Called before the learner applies reduced gradients."""
        self.updates += 1
        self._add(gradients, self._gradients)

    def step(self, report: StepReport) -> None:
        scores = report.meter.take_scores().state()
        self._step_losses.append({name: (fsum(totals), fsum(counts)) for name, (totals, counts, *_) in scores.items()})
        self._data.append(0 if report.batch is None else checksum(report.batch))
        self._num_sequences.append(0 if report.batch is None else len(report.batch.indices))
        if len(self._rates) < self.updates and report.learning_rate is not None:
            self._rates.append(report.learning_rate)

    def record(self, steps_of: int) -> Record:
        """Collective. The results of all ranks.

        Args:
            steps_of: the number of batches of a rank that count as one step.
        """
        comm = self._comm
        learner = self.learner
        self.record_weights(0, 0, numpy.zeros(0))
        checksums = {name: zlib.crc32(values.tobytes()) for name, values in learner.state.named_parameters()}
        by_rank = comm.gather(checksums, name="prove.weights")
        apart = next((name for name in checksums if len({rank[name] for rank in by_rank}) > 1), None)
        ranks = comm.gather((self._step_losses, self._data, self._num_sequences), name="prove.record")
        losses, data, num_sequences = zip(*ranks, strict=True)
        return Record(
            size=comm.size,
            losses=[sum_losses(step) for step in _by_step(losses, steps_of)],
            num_sequences=[sum(step) for step in _by_step(num_sequences, steps_of)],
            data=[sum(step) for step in _by_step(data, steps_of)],
            rates=self._rates,
            parts=find_parts(learner),
            apart=apart,
            weights={name: numpy.stack(values) for name, values in self._weights.items()},
            gradients=self._all_gradients(),
            elements=self._elements,
        )

    def _all_gradients(self) -> dict[str, Array]:
        """Collective. The sketches of all gradients in the model's order: each rank contributes those that no lower rank has."""
        comm = self._comm
        names = comm.gather(list(self._gradients), name="prove.names")
        before = {name for those in names[: comm.rank] for name in those}
        mine = {name: numpy.stack(values) for name, values in self._gradients.items() if name not in before}
        gradients = {name: values for share in comm.gather(mine, name="prove.gradients") for name, values in share.items()}
        return {name: gradients[name] for name in self._elements if name in gradients}

    def _add(self, arrays: Iterable[tuple[str, Array]], into: dict[str, list[Array]]) -> None:
        for name, values in arrays:
            self._elements[name] = values.size
            into.setdefault(name, []).append(sketch(values))


T = TypeVar("T")


def _by_step(by_rank: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """By step, the values of all ranks, from those of each rank's batches, of which `count` are one step."""
    steps = -(-len(by_rank[0]) // count)
    return [[value for rank in by_rank for value in rank[step * count : (step + 1) * count]] for step in range(steps)]
