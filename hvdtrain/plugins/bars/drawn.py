"""The bars of a count, and of the steps of a training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from hvdtrain.plugins.bars.notebook import Notebook, open_notebook
from hvdtrain.plugins.bars.terminal import Terminal, open_terminal
from hvdtrain.runtime.bars import Bars, StepsSoFar
from hvdtrain.runtime.process import Process
from hvdtrain.runtime.terminal import is_notebook


class DrawnSteps:
    """A bar for each epoch's training and each evaluation.

    Args:
        terminal: where it is drawn.
    """

    def __init__(self, terminal: Terminal | Notebook) -> None:
        self._terminal = terminal
        self._bar: Any = None

    def draw(self, steps: StepsSoFar, parts: Sequence[str]) -> None:
        form = self._terminal.bar_format(steps.share)
        if self._bar is None:
            self._bar = self._terminal.bar(desc=steps.name, total=steps.total, initial=steps.before, unit="step", bar_format=form)
            self._bar.start_t -= steps.seconds  # the bar is created late, but its rate counts from the beginning
        self._bar.n = steps.number
        self._bar.bar_format = form
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_postfix_str(fit_parts(parts, self._terminal.columns - len(str(self._bar))))

    def end(self, number: int, share: float) -> None:
        """Remove the bar; a notebook keeps it."""
        if self._bar is not None:
            self._bar.n = number
            self._bar.bar_format = self._terminal.bar_format(share)
            self._bar.close()
            self._bar = None


class DrawnBars(Bars):
    """tqdm's bars."""

    @contextmanager
    def count(self, name: str, total: int | None, unit: str) -> Iterator[Callable[[int], object]]:
        """On the terminal of stderr or stdout, if there is one."""
        with self._bar(total=total, unit=unit, desc=name or None) as bar:
            yield (lambda number: None) if bar is None else bar.update

    @contextmanager
    def line(self, text: str) -> Iterator[None]:
        with self._bar(desc=text, bar_format="{desc}{bar}"):
            yield

    @contextmanager
    def _bar(self, **options: Any) -> Iterator[Any]:
        """A bar of tqdm's; None: there is no terminal."""
        with (
            open_terminal(sys.stderr, sys.stdout) as terminal,
            nullcontext() if terminal is None else terminal.bar(**options) as bar,
        ):
            yield bar

    @contextmanager
    def steps(self, process: Process) -> Iterator[DrawnSteps | None]:
        """On the terminal of stdout, or in the cell of a notebook."""
        if not process.is_own and is_notebook():
            with open_notebook() as notebook:
                yield DrawnSteps(notebook)
            return
        with open_terminal(sys.stdout) as terminal, ExitStack() as inside:
            if terminal is not None and not process.prints_log:
                from tqdm.contrib.logging import logging_redirect_tqdm

                inside.enter_context(logging_redirect_tqdm())  # log lines of the user's program appear above the bar
            yield None if terminal is None else DrawnSteps(terminal)


BARS = DrawnBars()


def fit_parts(texts: Sequence[str], room: int) -> str:
    """As many of the first parts as fit, each with a separator before it. A number that is cut off would look like another one.

    >>> fit_parts(["ce 0.123", "", "error 0.4567", "learning rate 0.1"], 24)
    'ce 0.123, error 0.4567'
    """
    shown = ", ".join(text for text in texts if text)
    while len(shown) + 2 > room and shown:
        shown = shown.rpartition(", ")[0]
    return shown
