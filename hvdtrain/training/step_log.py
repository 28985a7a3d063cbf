"""Telling how far an epoch or an evaluation is: in lines of the log now and then, and on a terminal in a bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from hvdtrain.data.files.sizes import size_text
from hvdtrain.data.types import Batch
from hvdtrain.runtime.log import SCREEN, LogKeys, say
from hvdtrain.runtime.progress_bar import EVERY, Line, bar, line_below
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
    """Is told of every step, and tells of some.

    Args:
        interval: seconds between two lines of the log. At each of them the losses are looked at, for which a GPU is waited
            for; the bar shows those of the last time.
        line: where the bar is drawn; None: no bar.
        about: what lines say of a step besides.
    """

    def __init__(self, interval: float = inf, line: Line | None = None, about: Sequence[About] = ()) -> None:
        self._interval = interval
        self._about = about
        self._line = line

    def begin(self, epoch: int, dataset: str | None, rounds: int, elapsed: float = 0.0) -> None:
        """Something begins that consists of steps.

        Args:
            dataset: what is evaluated; None: an epoch's training.
            rounds: how many steps it is going to take from here on.
            elapsed: seconds that it has taken already.
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
            number: of the step, counted from 1.
            complete: how much is done by now, from 0 to 1.
            take_scores: gives the scores of the steps since it was called last.
            learning_rate: the last update's; None: no update has been done, or this is an evaluation.
            batch: this rank's, if it had one.
            peak_memory: tells the bytes that the device's memory had to give at most.
        """
        now = time.perf_counter()
        self._done += 1
        tell = now - self._told >= self._interval
        draw = self._line is not None and now - self._drawn >= EVERY
        if not tell and not draw:
            return
        per_step = (now - self._began) / self._done
        remaining = clock_text(per_step * (self._rounds - self._done))
        if tell:
            self._told = now
            self._losses = text(take_scores().means())
            elapsed = clock_text(self._elapsed + now - self._began)
            more = [words for about in self._about for words in about(batch, peak_memory)]
            parts = [f"{self._what}, step {number}", self._losses, *more, f"{per_step:.3f} sec/step", f"elapsed {elapsed}"]
            say(5, f"{_listed(parts)}, exp. remaining {remaining}, complete {complete:.2%}")
        if draw and self._line is not None:
            self._drawn = now
            rate = "" if learning_rate is None else f"learning rate {learning_rate:.3g}"
            parts = [f"step {number}", f"{remaining} remaining", self._losses, rate, f"{per_step:.3f} sec/step"]
            self._line.draw(f"{self._short} {bar(complete)}  {_listed(parts)}")

    def end(self) -> None:
        """What began is done."""
        if self._line is not None:
            self._line.clear()


def _listed(parts: list[str]) -> str:
    return ", ".join(part for part in parts if part)


@contextmanager
def open_step_log(keys: LogKeys, rank: int) -> Iterator[StepLog]:
    """Rank 0 tells; with a bar where it prints to a terminal, unless `log_verbosity` asks for scores and warnings only."""
    about = [*([batch_size] if keys.log_batch_size else []), *([memory_usage] if keys.torch_log_memory_usage else [])]
    if rank:
        yield StepLog()
    elif keys.targets[SCREEN] >= 3:
        with line_below() as line:
            yield StepLog(keys.log_interval, line, about)
    else:
        yield StepLog(keys.log_interval, about=about)
