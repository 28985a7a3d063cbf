"""How far an epoch or an evaluation has come: a line of the log now and then, and on a terminal a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

from hvdtrain.data.files import size_text
from hvdtrain.data.types import Batch
from hvdtrain.runtime import log
from hvdtrain.runtime.log import EVERY, SCREEN, LogKeys, Terminal, open_terminal
from hvdtrain.runtime.notebook import Notebook, is_notebook, open_notebook
from hvdtrain.runtime.process import OWN, Process
from hvdtrain.runtime.scores import Scores, text
from hvdtrain.runtime.timer import clock_text


class Measured(Protocol):
    """What a line about a step says of what was measured."""

    def drain_ready(self) -> Scores:
        """The scores of the batches since the last call, as far as they are there; does not wait for a GPU."""
        ...

    def take_scores(self) -> Scores:
        """The scores of all batches since the last call of this or of `drain_ready`; waits for a GPU."""
        ...

    def peak_memory(self) -> int | None:
        """Bytes of the device's memory used at most so far; None on a CPU."""
        ...


class ScoreBuffer:
    """A learner's scores, which are taken twice: for lines about steps, and for the sums of an epoch or an evaluation.

    `drain_ready` and `take_scores` give what came since the last call of either, `take_all` what came since its own last call.
    """

    def __init__(self, meter: Measured) -> None:
        self._meter = meter
        self._for_lines: list[Scores] = []
        self._for_sums: list[Scores] = []
        self.peak_memory = meter.peak_memory

    def drain_ready(self) -> Scores:
        """Of the batches whose scores are there; does not wait for a GPU."""
        return self._line(self._meter.drain_ready())

    def take_scores(self) -> Scores:
        """Of all batches; waits for a GPU."""
        return self._line(self._meter.take_scores())

    def take_all(self) -> Scores:
        """Of all batches; waits for a GPU."""
        taken = self._meter.take_scores()
        summed, self._for_sums = [*self._for_sums, taken], []
        self._for_lines.append(taken)
        return Scores.merge(summed)

    def _line(self, taken: Scores) -> Scores:
        told, self._for_lines = [*self._for_lines, taken], []
        self._for_sums.append(taken)
        return Scores.merge(told)


@dataclass(frozen=True)
class StepReport:
    """One finished step of a training or an evaluation.

    Attributes:
        number: of the step in its epoch or evaluation, counted from 1.
        complete: the share of the epoch or evaluation that is done, from 0 to 1.
        learning_rate: of the last update; None: there was none.
        batch: this rank's; None: it had none left.
        meter: has the scores and the memory. On a GPU, the scores are those that have arrived, a few steps late.
    """

    number: int
    complete: float
    learning_rate: float | None
    batch: Batch | None
    meter: Measured


def batch_size(report: StepReport) -> list[str]:
    """How large the batch is."""
    if report.batch is None:
        return []
    longest = [f"max_size:time:{key} {int(padded.seq_lens.max())}" for key, padded in report.batch.data.items()]
    return [f"num_seqs {len(report.batch.indices)}", *longest]


def memory_usage(report: StepReport) -> list[str]:
    """The peak of a GPU's memory."""
    peak = report.meter.peak_memory()
    return [] if peak is None else [f"mem_usage:cuda {size_text(peak)}"]


Listener = Callable[[StepReport, Mapping[str, float]], None]
"""Gets a step that a line is about, or that could be, and the mean losses since the last one."""

Field = Callable[[StepReport], list[str]]

FIELDS: dict[str, Field] = {"log_batch_size": batch_size, "torch_log_memory_usage": memory_usage}
"""What a line says about a step besides its losses and times, by the key that switches it on, in this order."""


class StepLog:
    """Receives every step, and reports some of them.

    Args:
        interval: seconds between two lines of the log, each with the mean losses of the steps since the last line; the bar shows
            those of the last line. On a GPU, the losses of the last few steps come with the next line.
        terminal: where the bar is drawn; None: no bar.
        fields: what lines say about a step besides its losses and times.
        every: a line after every N steps of an epoch or an evaluation, instead of after an interval; None: by the interval.
    """

    def __init__(
        self,
        interval: float = inf,
        terminal: Terminal | Notebook | None = None,
        fields: Sequence[Field] = (),
        every: int | None = None,
    ) -> None:
        self._interval = interval
        self._every = every
        self._fields = fields
        self._terminal = terminal
        self._bar: Any = None

    def begin(self, epoch: int, dataset: str | None, rounds: int, elapsed: float = 0.0, listener: Listener | None = None) -> None:
        """An epoch's training or an evaluation begins.

        Args:
            dataset: what is evaluated; None: training.
            rounds: the number of steps from here on.
            elapsed: seconds spent on it before, where an interrupted epoch continues.
            listener: called after each line, and once more by `finish`; None: nobody.
        """
        self._listener = listener
        self._untold: StepReport | None = None
        self._what = f"train epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset!r} eval"
        self._short = f"epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset}"
        self._rounds, self._elapsed = rounds, elapsed
        self._done = self._number = 0
        self._losses = ""
        self._began = self._reported_at = self._drawn = time.perf_counter()

    def step(self, report: StepReport) -> None:
        """One more step is done."""
        now = time.perf_counter()
        self._done += 1
        self._number = report.number
        is_due = now - self._reported_at >= self._interval if self._every is None else report.number % self._every == 0
        self._untold = None if is_due or self._listener is None else report
        draw = self._terminal is not None and now - self._drawn >= EVERY
        if not is_due and not draw:
            return
        per_step = (now - self._began) / self._done
        if is_due:
            self._reported_at = now
            means = report.meter.drain_ready().means()
            self._losses = text(means)
            elapsed = clock_text(self._elapsed + now - self._began)
            more = [words for field in self._fields for words in field(report)]
            parts = [f"{self._what}, step {report.number}", self._losses, *more, f"{per_step:.3f} sec/step", f"elapsed {elapsed}"]
            remaining = clock_text(per_step * (self._rounds - self._done))
            log.debug(f"{_listed(parts)}, exp. remaining {remaining}, complete {report.complete:.2%}")
            if self._listener is not None:
                self._listener(report, means)
        if draw and self._terminal is not None:
            self._drawn = now
            if self._bar is None:
                before = report.number - self._done
                total = before + self._rounds
                form = self._terminal.bar_format
                self._bar = self._terminal.bar(desc=self._short, total=total, initial=before, unit="step", bar_format=form)
                self._bar.start_t -= now - self._began
            self._bar.n = report.number
            rate = "" if report.learning_rate is None else f"learning rate {report.learning_rate:.3g}"
            columns = self._terminal.columns
            self._bar.bar_format = self._terminal.bar_format
            self._bar.set_postfix_str("", refresh=False)
            self._bar.set_postfix_str(fitting([*self._losses.split(", "), rate], columns - len(str(self._bar))))

    def finish(self) -> None:
        """All steps are done, and their scores are there: the listener gets the last one, unless it has it already."""
        if self._untold is not None and self._listener is not None:
            self._listener(self._untold, self._untold.meter.drain_ready().means())
        self._untold = self._listener = None
        self.end()

    def end(self) -> None:
        """The epoch's training or the evaluation is over: remove the bar, or in a notebook end it."""
        if self._bar is not None:
            self._bar.n = self._number  # a notebook keeps the bar
            self._bar.close()
            self._bar = None


def fitting(parts: list[str], room: int) -> str:
    """The first of the parts, as many as fit with a separator before each: half a number would be taken for a whole one.

    >>> fitting(["ce 0.123", "", "error 0.4567", "learning rate 0.1"], 24)
    'ce 0.123, error 0.4567'
    """
    shown = _listed(parts)
    while len(shown) + 2 > room and shown:
        shown = shown.rpartition(", ")[0]
    return shown


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)


@contextmanager
def open_step_log(keys: LogKeys, rank: int, process: Process = OWN) -> Iterator[StepLog]:
    """Rank 0 logs the steps; with a bar if it prints to a terminal or is a notebook's kernel, unless `log_verbosity` asks for
    scores and warnings only.
    """
    fields = [field for name, field in FIELDS.items() if getattr(keys, name)]
    if rank:
        yield StepLog()
    elif keys.targets[SCREEN] >= 3 and (process.prints_log or not process.is_own):
        with _place_of_bars(process) as terminal:
            step_log = StepLog(keys.log_interval, terminal, fields, keys.log_interval_steps)
            try:
                yield step_log
            finally:
                step_log.end()
    else:
        yield StepLog(keys.log_interval, fields=fields, every=keys.log_interval_steps)


@contextmanager
def _place_of_bars(process: Process) -> Iterator[Terminal | Notebook | None]:
    if not process.is_own and is_notebook():
        with open_notebook() as notebook:
            yield notebook
        return
    with open_terminal(sys.stdout) as terminal, ExitStack() as inside:
        if terminal is not None and not process.prints_log:
            from tqdm.contrib.logging import logging_redirect_tqdm

            inside.enter_context(logging_redirect_tqdm())  # lines of the program's log stand above the bar
        yield terminal
