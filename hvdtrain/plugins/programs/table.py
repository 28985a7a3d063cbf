"""The table of epochs that a notebook shows: while it trains, and as the result."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.rows import rate_text, score_text
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime.terminal import is_notebook
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session


def epoch_table(history: Sequence[EpochRecord], best: int | None) -> str:
    """A row for each epoch as HTML, that of the best one in bold."""
    names = list(dict.fromkeys(name for record in history for name in record.scores))
    rows = [["epoch", "learning rate", *(name.replace("_loss_", " ", 1) for name in names)]]
    for record in history:
        scores = [score_text(record.scores[name]) if name in record.scores else "" for name in names]
        rows.append([str(record.epoch), rate_text(record.learning_rate), *scores])
    table = ""
    for row in rows:
        style = " style=font-weight:bold" if row[0] == str(best) else ""
        table += f"<tr{style}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    return f"<table>{table}</table>"


@contextmanager
def show_table(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """In a notebook, the table grows."""
    yield Reporters([GrowingTable(session)] if is_notebook() else [])


class GrowingTable:
    """Shows the table in the running cell of a notebook, with a row more after every epoch."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shown: Any = None

    def epoch(self, report: EpochReport) -> None:
        """After an epoch."""
        ipython: Any = importlib.import_module("IPython.display")
        best = self._session.best.measure.best(self._session.best.records(self._session.progress))
        table = ipython.HTML(epoch_table(self._session.progress.history, None if best is None else best.epoch))
        if self._shown is None:
            self._shown = ipython.display(table, display_id=True)
        else:
            self._shown.update(table)
