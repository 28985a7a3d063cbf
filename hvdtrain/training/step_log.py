"""The progress of an epoch or an evaluation: occasional lines in the log, and a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from hvdtrain.data.files import size_text
from hvdtrain.data.types import Batch
from hvdtrain.learner.meter import Meter
from hvdtrain.report.rows import progress_parts
from hvdtrain.report.steps import StepRecord
from hvdtrain.runtime import log
from hvdtrain.runtime.bars import EVERY, StepBar, StepsSoFar, bars
from hvdtrain.runtime.log import BETWEEN, SCREEN, LogKeys
from hvdtrain.runtime.process import OWN, Process
from hvdtrain.runtime.scores import Scores, text
from hvdtrain.runtime.timer import clock_text


class ScoreBuffer:
    """A learner's scores, which are used twice: in lines about steps, and in the sums of an epoch or an evaluation.

    `drain_ready` and `take_scores` return the scores since the last call of either, `take_all` those since its last call.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._for_lines: list[Scores] = []
        self._for_sums: list[Scores] = []
        self.peak_memory = meter.peak_memory

    def drain_ready(self) -> Scores:
        """The scores that have arrived; does not wait for a GPU."""
        return self._take_for_line(self._meter.drain_ready())

    def take_scores(self) -> Scores:
        """The scores of all batches; waits for a GPU."""
        return self._take_for_line(self._meter.take_scores())

    def take_all(self) -> Scores:
        """The scores of all batches; waits for a GPU."""
        scores = self._meter.take_scores()
        summed, self._for_sums = [*self._for_sums, scores], []
        self._for_lines.append(scores)
        return Scores.merge(summed)

    def _take_for_line(self, scores: Scores) -> Scores:
        logged, self._for_lines = [*self._for_lines, scores], []
        self._for_sums.append(scores)
        return Scores.merge(logged)


class StepReport(NamedTuple):
    """One finished step of a training or an evaluation.

    Attributes:
        number: the step's number in the epoch or evaluation, from 1.
        complete: the share of the epoch or evaluation that is done, from 0 to 1.
        learning_rate: of the last update; None: there was none.
        batch: this rank's batch; None: it had none left.
        meter: has the scores and the memory. On a GPU, scores arrive a few steps late.
    """

    number: int
    complete: float
    learning_rate: float | None
    batch: Batch | None
    meter: ScoreBuffer


def batch_size(report: StepReport) -> list[str]:
    if report.batch is None:
        return []
    longest = [f"max_size:time:{key} {int(padded.seq_lens.max())}" for key, padded in report.batch.data.items()]
    return [f"num_seqs {len(report.batch.indices)}", *longest]


def memory_usage(report: StepReport) -> list[str]:
    """The peak memory of a GPU."""
    peak = report.meter.peak_memory()
    return [] if peak is None else [f"mem_usage:cuda {size_text(peak)}"]


Listener = Callable[[StepReport, Mapping[str, float]], StepRecord | None]
"""Called with a logged step (or the last one) and the mean losses since the previous call. Returns what it recorded."""

Field = Callable[[StepReport], list[str]]

FIELDS: dict[str, Field] = {"log_batch_size": batch_size, "torch_log_memory_usage": memory_usage}
"""Additional fields of a line about a step, in this order, by the key that enables them."""

SELDOM = 600.0
"""Seconds after which a line about a step is shown at level 3 as well, so that a long epoch does not look like a hang."""


@dataclass
class _LoggedSteps:
    """The progress of an epoch's training or of an evaluation.

    Attributes:
        name, short: the name of the epoch or the evaluation, for a line and for the bar.
        num_steps: the number of steps that remained when it began.
        elapsed: seconds spent on it before, if an interrupted epoch is resumed.
        listener: called after each line.
        unreported: the last step, if it was not logged.
        done: the number of steps since it began.
        number: the number of the last step.
        share: the share of the epoch or evaluation that is done, from 0 to 1.
        losses: those of the last line.
        scores: those of all lines.
        began, reported_at, shown, drawn: when it began, when the last line was logged, when one was logged at level 3, and when
            the bar was drawn.
    """

    name: str = ""
    short: str = ""
    num_steps: int = 0
    elapsed: float = 0.0
    listener: Listener | None = None
    unreported: StepReport | None = field(init=False, default=None)
    done: int = field(init=False, default=0)
    number: int = field(init=False, default=0)
    share: float = field(init=False, default=0.0)
    losses: str = field(init=False, default="")
    scores: Scores = field(init=False, default_factory=Scores)
    began: float = 0.0

    def __post_init__(self) -> None:
        self.reported_at = self.shown = self.drawn = self.began


class StepLog:
    """Receives every step and logs some of them.

    Args:
        interval: seconds between two lines, each with the mean losses of the steps since the previous line; the bar shows those
            of the last line. On a GPU, the losses of the last few steps are part of the next line.
        bar: shows how far it is; None: nothing does.
        fields: additional fields of the lines.
        every: log every N steps of an epoch or an evaluation, instead of at intervals; None: at intervals.
    """

    def __init__(
        self,
        interval: float = inf,
        bar: StepBar | None = None,
        fields: Sequence[Field] = (),
        every: int | None = None,
    ) -> None:
        self._interval = interval
        self._every = every
        self._fields = fields
        self._bar = bar
        self._progress = _LoggedSteps()

    def begin(self, epoch: int, dataset: str | None, rounds: int, elapsed: float = 0.0, listener: Listener | None = None) -> None:
        """An epoch's training or an evaluation begins.

        Args:
            dataset: the name of the evaluated dataset; None: training.
            rounds: the number of remaining steps.
            elapsed: seconds spent on it before, if an interrupted epoch is resumed.
            listener: called after each line, and once more by `finish`.
        """
        name = f"train epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset!r} eval"
        short = f"epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset}"
        now = time.perf_counter()
        self._progress = _LoggedSteps(name, short, rounds, elapsed, listener, now)

    def step(self, report: StepReport) -> None:
        """Count a step, and log it or draw the bar if that is due."""
        now = time.perf_counter()
        progress = self._progress
        progress.done += 1
        progress.number = report.number
        progress.share = report.complete
        is_due = now - progress.reported_at >= self._interval if self._every is None else report.number % self._every == 0
        progress.unreported = None if is_due or progress.listener is None else report
        if is_due:
            self._log(report, progress, now)
        if self._bar is not None and now - progress.drawn >= EVERY:
            self._draw(self._bar, report, progress, now)

    def _log(self, report: StepReport, progress: _LoggedSteps, now: float) -> None:
        """Call the listener, and log a line: first the part that programs read, then the rest."""
        progress.reported_at = now
        ready = report.meter.drain_ready()
        means = ready.means()
        progress.losses = text(means)
        progress.scores = Scores.merge([progress.scores, ready]).compact()
        record = None if progress.listener is None else progress.listener(report, means)
        per_step = (now - progress.began) / progress.done
        elapsed = clock_text(progress.elapsed + now - progress.began)
        more = [words for field in self._fields for words in field(report)]
        parts = [f"{progress.name}, step {report.number}", progress.losses, *more, f"{per_step:.3f} sec/step"]
        remaining = clock_text(per_step * (progress.num_steps - progress.done))
        line = f"{_join([*parts, f'elapsed {elapsed}'])}, exp. remaining {remaining}, complete {report.complete:.2%}"
        speed = None if record is None else (record.sequences_per_second, record.frames_per_second)
        memory = None if record is None else record.memory
        level = 3 if now - progress.shown >= SELDOM else 5
        progress.shown = now if level == 3 else progress.shown
        log.row(level, BETWEEN.join([line, *progress_parts(text(progress.scores.means()), speed, memory)]))

    def _draw(self, bar: StepBar, report: StepReport, progress: _LoggedSteps, now: float) -> None:
        progress.drawn = now
        before = report.number - progress.done
        total = before + progress.num_steps
        steps = StepsSoFar(progress.short, before, report.number, total, report.complete, now - progress.began)
        rate = "" if report.learning_rate is None else f"learning rate {report.learning_rate:.3g}"
        bar.draw(steps, [*progress.losses.split(", "), rate])

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside the `with` block, the log is about something else; afterwards it continues, without the time in between."""
        self.end()
        before = self._progress
        began = time.perf_counter()
        try:
            yield
        finally:
            self.end()
            self._progress = before
            passed = time.perf_counter() - began
            before.began += passed
            before.reported_at += passed
            before.shown += passed

    def finish(self) -> None:
        """End after the last step, when all scores have arrived: call the listener with that step, unless it was logged."""
        progress = self._progress
        if progress.unreported is not None and progress.listener is not None:
            progress.listener(progress.unreported, progress.unreported.meter.drain_ready().means())
        progress.unreported = progress.listener = None
        self.end()

    def end(self) -> None:
        """End the epoch's training or the evaluation: remove the bar, or in a notebook finish it."""
        if self._bar is not None:
            self._bar.end(self._progress.number, self._progress.share)


def _join(words: list[str]) -> str:
    return ", ".join(filter(None, words))


@contextmanager
def open_step_log(keys: LogKeys, rank: int, process: Process = OWN) -> Iterator[StepLog]:
    """A log of steps on rank 0, with a bar if it prints to a terminal or is a notebook's kernel, unless `log_verbosity` asks for
    only scores and warnings.
    """
    fields = [field for name, field in FIELDS.items() if getattr(keys, name)]
    if rank:
        yield StepLog()
    elif keys.targets[SCREEN] >= 3 and (process.prints_log or not process.is_own):
        with bars().steps(process) as bar:
            step_log = StepLog(keys.log_interval, bar, fields, keys.log_interval_steps)
            try:
                yield step_log
            finally:
                step_log.end()
    else:
        yield StepLog(keys.log_interval, fields=fields, every=keys.log_interval_steps)
