"""The receivers of a training's reports: files, the log, and those of plug-ins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from hvdtrain.comm.base import together
from hvdtrain.config.plugins import Registry
from hvdtrain.report.epoch import EpochReport, EvaluationReport, Reporter
from hvdtrain.report.json_lines import EvaluationLines, JsonLines, StepLines
from hvdtrain.report.rows import BEST, cost_row, epoch_name, epoch_seconds, score_row, seconds_left
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.schedule.measure import changed_scales_line, fallback_line, unclear_line
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session

REPORTERS: Registry[Callable[[Settings, Session, Start], AbstractContextManager[Reporters]]] = Registry("reporters")
"""Those of plug-ins."""


@contextmanager
def open_reporters(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """Collective. The receivers of reports on epochs and steps, until the block ends; none on ranks other than 0."""
    rank = session.comm.rank
    with ExitStack() as stack:

        def open_on_rank_zero() -> Reporters:
            reporters = _own_reporters(settings, session)
            return reporters.with_others([stack.enter_context(make(settings, session, start)) for make in REPORTERS.values()])

        yield together(session.comm, lambda: Reporters() if rank else open_on_rank_zero(), name="open_reporters")


def _own_reporters(settings: Settings, session: Session) -> Reporters:
    progress = session.progress
    folder = settings.records
    epochs = JsonLines(folder / "scores.jsonl")
    steps = StepLines(folder / "steps.jsonl")
    epochs.go_on(progress.epoch, progress.report)
    current = progress.current
    steps.go_on(progress.epoch + 1, 0 if current is None else progress.step - current.first_step)
    best = BestReporter(session)
    reporters: list[Reporter] = [epochs, Rows(session, settings.run.num_epochs), best]
    evaluations = EvaluationLines(folder / "evaluations.jsonl")
    evaluations.go_on({record.step for record in progress.evaluations})
    return Reporters(reporters, [steps.step], evaluations=[evaluations.evaluation, best.evaluation])


class Rows:
    """Logs two rows about every epoch: its scores, and what it took."""

    def __init__(self, session: Session, num_epochs: int) -> None:
        self._session = session
        self._num_epochs = num_epochs
        self._seconds: list[float] = []

    def epoch(self, report: EpochReport) -> None:
        measure = self._session.best.measure
        history = self._session.best.records(self._session.progress)
        best = measure.best(history)
        is_best = best is not None and best.epoch == report.epoch and best.at_step is None
        self._seconds.append(epoch_seconds(report))
        left = seconds_left(self._seconds, self._num_epochs - report.epoch)
        indent = len(epoch_name(report.epoch, self._num_epochs))
        scores = score_row(report, self._num_epochs, measure.name(history), is_best)
        log.row(1, scores, indent, good=BEST if is_best else "")
        log.row(3, cost_row(report, left, time.time(), indent), indent)


class BestReporter:
    """Logs which epoch is the best so far, and updates best.json even after an epoch whose model is not saved."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_first = True
        self._has_warned = False  # of sums that cannot be compared

    def evaluation(self, report: EvaluationReport) -> None:
        """After an evaluation within an epoch, if these compete."""
        keeper = self._session.best
        if not keeper.within_epochs:
            return
        records = keeper.records(self._session.progress)
        best = keeper.measure.best(records)
        name = keeper.measure.name(records)
        if best is not None and name is not None and best.at_step == report.global_step:
            log.info(
                f"epoch {best.epoch}, step {report.step}, is the best so far: {name} {best.scores[name]:.4g}, "
                f"{keeper.measure.direction(name)}"
            )
        keeper.update(records)

    def epoch(self, report: EpochReport) -> None:
        history = self._session.best.records(self._session.progress)
        measure = self._session.best.measure
        best = measure.best(history)
        name = measure.name(history)
        for line in (unclear_line(history, measure), fallback_line(history, measure)) if self._is_first else ():
            if line is not None:
                log.warning(line)
        if best is not None and name is not None and best.epoch == report.epoch and best.at_step is None:
            log.detail(f"epoch {best.epoch} is the best so far: {name} {best.scores[name]:.4g}, {measure.direction(name)}")
        if not self._has_warned and (line := changed_scales_line(self._session.progress.history, measure)) is not None:
            self._has_warned = True
            log.warning(line)
        self._is_first = False
        self._session.best.update(history)
