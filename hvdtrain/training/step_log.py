"""How far an epoch or an evaluation has come: a line of the log now and then, and on a terminal a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

from hvdtrain.data.files.sizes import size_text
from hvdtrain.data.types import Batch
from hvdtrain.runtime.log import SCREEN, LogKeys, say
from hvdtrain.runtime.progress_bar import EVERY, Terminal, open_terminal
from hvdtrain.runtime.scores import Scores, text
from hvdtrain.runtime.timer import clock_text

About = Callable[[Batch | None, Callable[[], int | None]], list[str]]
"""What else to say of a step, from its batch (None: this rank had none), and from what tells the peak of the device's memory."""


def batch_size(batch: Batch | None, peak_memory: Callable[[], int | None]) -> list[str]:
    """How large the batch is, in RETURNN's words."""
    if batch is None:
        return []
    longest = [f"max_size:time:{key} {int(padded.seq_lens.max())}" for key, padded in batch.data.items()]
    return [f"num_seqs {len(batch.indices)}", *longest]


def memory_usage(batch: Batch | None, peak_memory: Callable[[], int | None]) -> list[str]:
    """The peak of a GPU's memory."""
    peak = peak_memory()
    return [] if peak is None else [f"mem_usage:cuda {size_text(peak)}"]


class StepLog:
    """Receives every step, and reports some of them.

    Args:
        interval: seconds between two lines of the log. Only for such a line are the losses read, which waits for the GPU; the
            bar shows those of the last line.
        terminal: where the bar is drawn; None: no bar.
        about: what lines say of a step besides.
    """

    def __init__(self, interval: float = inf, terminal: Terminal | None = None, about: Sequence[About] = ()) -> None:
        self._interval = interval
        self._about = about
        self._terminal = terminal
        self._bar: Any = None

    def begin(self, epoch: int, dataset: str | None, rounds: int, elapsed: float = 0.0) -> None:
        """An epoch's training or an evaluation begins.

        Args:
            dataset: what is evaluated; None: training.
            rounds: the number of steps from here on.
            elapsed: seconds spent on it before, where an interrupted epoch continues.
        """
        self._what = f"train epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset!r} eval"
        self._short = f"epoch {epoch}" if dataset is None else f"epoch {epoch} {dataset}"
        self._rounds, self._elapsed = rounds, elapsed
        self._done = 0
        self._losses = ""
        self._began = self._told = self._drawn = time.perf_counter()

    def step(
        self,
        number: int,
        complete: float,
        take_scores: Callable[[], Scores],
        learning_rate: float | None = None,
        batch: Batch | None = None,
        peak_memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        """One more step is done.

        Args:
            number: the step's, counted from 1.
            complete: the share that is done, from 0 to 1.
            take_scores: returns the scores of the steps since its last call.
            learning_rate: the step's.
            batch: this rank's, if it had one.
            peak_memory: returns the peak of the device's memory in bytes.
        """
        now = time.perf_counter()
        self._done += 1
        tell = now - self._told >= self._interval
        draw = self._terminal is not None and now - self._drawn >= EVERY
        if not tell and not draw:
            return
        per_step = (now - self._began) / self._done
        if tell:
            self._told = now
            self._losses = text(take_scores().means())
            elapsed = clock_text(self._elapsed + now - self._began)
            more = [words for about in self._about for words in about(batch, peak_memory)]
            parts = [f"{self._what}, step {number}", self._losses, *more, f"{per_step:.3f} sec/step", f"elapsed {elapsed}"]
            remaining = clock_text(per_step * (self._rounds - self._done))
            say(5, f"{_listed(parts)}, exp. remaining {remaining}, complete {complete:.2%}")
        if draw and self._terminal is not None:
            self._drawn = now
            if self._bar is None:
                before = number - self._done
                self._bar = self._terminal.bar(desc=self._short, total=before + self._rounds, initial=before, unit="step")
                self._bar.start_t -= now - self._began
            self._bar.n = number
            rate = "" if learning_rate is None else f"learning rate {learning_rate:.3g}"
            self._bar.set_postfix_str(_listed([self._losses, rate]))

    def end(self) -> None:
        """The epoch's training or the evaluation is over: remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)


@contextmanager
def open_step_log(keys: LogKeys, rank: int) -> Iterator[StepLog]:
    """Rank 0 logs the steps; with a bar if it prints to a terminal, unless `log_verbosity` asks for scores and warnings only."""
    about = [*([batch_size] if keys.log_batch_size else []), *([memory_usage] if keys.torch_log_memory_usage else [])]
    if rank:
        yield StepLog()
    elif keys.targets[SCREEN] >= 3:
        with open_terminal(sys.stdout) as terminal:
            log = StepLog(keys.log_interval, terminal, about)
            try:
                yield log
            finally:
                log.end()
    else:
        yield StepLog(keys.log_interval, about=about)
