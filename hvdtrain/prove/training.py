"""What the ranks of one run do: train some steps with the engine itself, on given global batches, and write down what came out.

The largest number of ranks takes the batches that its training would begin with. A step's batches on all of these ranks are a
global batch; with fewer ranks, the same sequences are dealt to fewer, larger batches.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import fsum
from pathlib import Path
from typing import TypeVar

import numpy

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver import Unsaved
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.types import Array
from hvdtrain.engine import Engine, Pace, Rates
from hvdtrain.errors import DataError
from hvdtrain.prove.causes import parts_of, probe, without_dropout
from hvdtrain.prove.compare import Losses, Record, checksum, sketch, summed
from hvdtrain.report.steps import Reporters
from hvdtrain.run import open_pace, open_rates
from hvdtrain.runtime.log import silence
from hvdtrain.session import Session, open_session, writing_nothing
from hvdtrain.settings import Settings
from hvdtrain.training.step_log import StepLog, StepReport


@dataclass(frozen=True)
class GlobalBatches:
    """The batches of some steps.

    Attributes:
        plan: batch i is that of rank i % ranks in step i // ranks.
        ranks: the number of ranks that the batches were made for.
    """

    plan: Plan
    ranks: int

    @property
    def steps(self) -> int:
        return self.plan.num_batches // self.ranks

    def dealt(self, size: int) -> Plan:
        """The same sequences in each step, in N batches."""
        if size == self.ranks:
            return self.plan
        ends = self.plan.bounds[:: self.ranks]
        cuts = [begin + numpy.arange(size) * (end - begin) // size for begin, end in zip(ends, ends[1:], strict=False)]
        return Plan(self.plan.order, numpy.concatenate([*cuts, ends[-1:]]).astype(numpy.int64))

    def save(self, path: Path) -> None:
        numpy.savez(path, order=self.plan.order, bounds=self.plan.bounds, ranks=self.ranks)

    @staticmethod
    def load(path: Path) -> GlobalBatches:
        with numpy.load(path, allow_pickle=False) as stored:
            return GlobalBatches(Plan(stored["order"], stored["bounds"]), int(stored["ranks"]))


def first_steps(plan: Plan, ranks: int, steps: int) -> GlobalBatches:
    """The first steps of an epoch in which every rank has a batch. Raises: DataError, on all ranks alike: there is none."""
    found = min(steps, plan.num_batches // ranks)
    if not found:
        error = DataError(
            f"train: expected at least {ranks} batches in an epoch for {ranks} ranks, got {plan.num_batches} "
            "(smaller max_seqs or batch_size, or fewer --ranks)"
        )
        error.on_every_rank = True
        raise error
    bounds = plan.bounds[: found * ranks + 1]
    return GlobalBatches(Plan(plan.order[: bounds[-1]], bounds), ranks)


@dataclass(frozen=True)
class Task:
    """What a run has to do, as the command tells its ranks in a JSON file.

    Attributes:
        folder: for everything that is written.
        name: of the record, NAME.npz.
        batches: a file with the global batches; the first run writes it.
        dropout: whether it is left as it is.
        diagnose: the records of runs that differ, by name: one rank does what each of them did, batch after batch, and finds out
            whether the model draws random numbers.
    """

    folder: str
    name: str
    steps: int
    batches: str
    dropout: bool = True
    diagnose: Sequence[str] = ()

    def path(self, name: str) -> Path:
        """The file of a record."""
        return Path(self.folder, f"{name}.npz")


def run_task(settings: Settings, task: Task) -> None:
    """Collective. Do what a task says. Raises: HvdtrainError."""
    settings = proving(settings, task)
    if not task.diagnose:
        train(settings, task, task.name)
        return
    for name in task.diagnose:
        other = Record.load(task.path(name))
        train(settings, task, f"{task.name}-{name}", accumulated=other)
    batches = GlobalBatches.load(Path(task.batches))
    probed = probe(settings, batches.plan.batch(0), task.dropout, Path(task.folder))
    task.path(task.name).with_suffix(".json").write_text(json.dumps(asdict(probed)))


def proving(settings: Settings, task: Task) -> Settings:
    """The settings of a training that starts anew, on the training data only, and writes nothing into the user's folders."""
    settings = writing_nothing(settings)
    start = settings.start
    if start.load is None:  # the folder is a new one: there is nothing to go on with
        start = replace(start, start_epoch="auto", load_epoch=None)
    return replace(
        settings,
        run=replace(settings.run, model=str(Path(task.folder, "model"))),
        log=replace(settings.log, log_verbosity=0),
        start=start,
        datasets=settings.datasets[:1],
    )


def train(settings: Settings, task: Task, name: str, accumulated: Record | None = None) -> None:
    """Collective. Train, and write the record.

    Args:
        accumulated: train on the batches of this run's ranks one after another, with its learning rates.
    """
    with open_session(settings, "dry_run") as session, silence():
        comm = session.comm
        if not task.dropout:
            without_dropout(session.learner)
        batches = _global_batches(session, task)
        dealt = batches.dealt(comm.size if accumulated is None else accumulated.size)
        feed = replace(session.feeds[0], distribution="shard", only=dealt)
        recorder = Recorder(session)
        session.learner.observer = recorder.gradients_of
        pace = replace(open_pace(settings), num_epochs=session.progress.epoch + 1, save_steps=None, save_minutes=None)
        pace = replace(pace, ends_early=lambda _: None)
        rates = open_rates(settings, comm.size)
        if accumulated is not None:
            pace, rates = _accumulating(pace, accumulated.size), given(accumulated.rates, lambda: recorder.updates)
        fresh = Progress(session.progress.step, session.progress.epoch, list(session.progress.history))
        opened = replace(session, feeds=[feed], saver=Unsaved(), progress=fresh)
        Engine(opened, rates, pace, Reporters(), recorder, recorder.note).run()
        record = recorder.record(1 if accumulated is None else accumulated.size)
        if comm.rank == 0:
            record.save(task.path(name))


def _global_batches(session: Session, task: Task) -> GlobalBatches:
    """Collective. Those that the first run has written; the first run chooses and writes them."""
    path = Path(task.batches)
    comm, feed = session.comm, session.feeds[0]
    if comm.gather(path.exists(), name="prove.batches")[0]:
        return GlobalBatches.load(path)
    batches = first_steps(replace(feed, distribution="shard").plan(session.progress.epoch + 1), comm.size, task.steps)
    if comm.rank == 0:
        batches.save(path)
    return batches


def _accumulating(pace: Pace, size: int) -> Pace:
    """One rank that takes N ranks' batches one after another for each of their steps."""
    own = pace.rounds_per_update
    return replace(pace, rounds_per_update=lambda epoch, complete, step: size * own(epoch, complete, step // size))


def given(rates: Sequence[float], updates: Callable[[], int]) -> Rates:
    """These learning rates, one for each update, however often the engine asks.

    Args:
        updates: returns the number of updates done so far.
    """
    return Rates(lambda epoch, history: rates[0], lambda step, complete, epoch_rate: rates[min(updates(), len(rates) - 1)])


class Recorder(StepLog):
    """Writes down what an engine does, as its log of steps, its trace, and the learner's observer.

    Attributes:
        updates: the number of updates done so far.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._step_losses: list[Losses] = []
        self._data: list[int] = []
        self._num_sequences: list[int] = []
        self._rates: list[float] = []
        self._weights: dict[str, list[Array]] = {}
        self._gradients: dict[str, list[Array]] = {}
        self._elements: dict[str, int] = {}
        self.updates = 0
        self._weighed = -1  # the number of updates after which the weights were last written down

    def note(self, epoch: int, step: int, indices: Array) -> None:
        """The engine is about to take a step: the weights are those after the updates before it."""
        if self._session.comm.rank == 0 and self._weighed < self.updates:
            self._weighed = self.updates
            self._add(self._session.learner.state.named_parameters(), self._weights)

    def gradients_of(self, gradients: Iterable[tuple[str, Array]]) -> None:
        """The learner is about to apply reduced gradients."""
        self.updates += 1
        self._add(gradients, self._gradients)

    def step(self, report: StepReport) -> None:
        scores = report.meter.take_scores().state()
        self._step_losses.append({name: (fsum(totals), fsum(counts)) for name, (totals, counts) in scores.items()})
        self._data.append(0 if report.batch is None else checksum(report.batch))
        self._num_sequences.append(0 if report.batch is None else len(report.batch.indices))
        if len(self._rates) < self.updates and report.learning_rate is not None:
            self._rates.append(report.learning_rate)

    def record(self, steps_of: int) -> Record:
        """Collective. All ranks' results.

        Args:
            steps_of: the number of batches of a rank that count as one step.
        """
        comm, learner = self._session.comm, self._session.learner
        self.note(0, 0, numpy.zeros(0))
        own = {name: zlib.crc32(values.tobytes()) for name, values in learner.state.named_parameters()}
        everybodys = comm.gather(own, name="prove.weights")
        apart = next((name for name in own if len({theirs[name] for theirs in everybodys}) > 1), None)
        ranks = comm.gather((self._step_losses, self._data, self._num_sequences), name="prove.record")
        losses, data, num_sequences = zip(*ranks, strict=True)
        return Record(
            size=comm.size,
            losses=[summed(each) for each in _grouped(losses, steps_of)],
            num_sequences=[sum(each) for each in _grouped(num_sequences, steps_of)],
            data=[sum(each) for each in _grouped(data, steps_of)],
            rates=self._rates,
            parts=parts_of(learner),
            apart=apart,
            weights={name: numpy.stack(values) for name, values in self._weights.items()},
            gradients=self._all_gradients(),
            elements=self._elements,
        )

    def _all_gradients(self) -> dict[str, Array]:
        """Collective. The sketches of all gradients in the model's order: each rank adds those that no rank before it has."""
        comm = self._session.comm
        names = comm.gather(list(self._gradients), name="prove.names")
        before = {name for those in names[: comm.rank] for name in those}
        mine = {name: numpy.stack(values) for name, values in self._gradients.items() if name not in before}
        found = {name: values for share in comm.gather(mine, name="prove.gradients") for name, values in share.items()}
        return {name: found[name] for name in self._elements if name in found}

    def _add(self, arrays: Iterable[tuple[str, Array]], into: dict[str, list[Array]]) -> None:
        for name, values in arrays:
            self._elements[name] = values.size
            into.setdefault(name, []).append(sketch(values))


T = TypeVar("T")


def _grouped(by_rank: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """By step, what all ranks have for it.

    Args:
        by_rank: for each rank, what it has for each of its batches.
        count: the number of batches of a rank that count as one step.
    """
    steps = len(by_rank[0]) // count
    return [[each for rank in by_rank for each in rank[step * count : (step + 1) * count]] for step in range(steps)]
