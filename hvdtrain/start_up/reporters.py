"""The receivers of a training's reports: files, the log, and experiment trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hvdtrain.comm.base import together
from hvdtrain.config.plugins import Registry
from hvdtrain.config.source import as_function
from hvdtrain.report.ends import Status
from hvdtrain.report.epoch import EpochReport, EvaluationReport, Reporter
from hvdtrain.report.json_lines import EvaluationLines, JsonLines, StepLines
from hvdtrain.report.metrics_file import MetricsFile
from hvdtrain.report.rows import BEST, cost_row, epoch_name, epoch_seconds, score_row, seconds_left
from hvdtrain.report.runs import Start
from hvdtrain.report.services import RunDescription, config_values, git_state
from hvdtrain.report.steps import Reporters
from hvdtrain.report.table import GrowingTable, epoch_table
from hvdtrain.report.trackers import (
    PATIENCE,
    BackgroundTracker,
    BestEffortReporter,
    RunIds,
    TensorBoard,
    TrackEpoch,
    write_artifacts,
)
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.notebook import is_notebook
from hvdtrain.runtime.records import models_of
from hvdtrain.schedule.file import LearningRateFile, epoch_meta, epoch_rate
from hvdtrain.schedule.measure import changed_scales_line, fallback_line, unclear_line
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session

REPORTERS: Registry[Callable[[Settings], Reporter | None]] = Registry("reporters")
"""Those of plug-ins."""


def open_reporters(settings: Settings, session: Session) -> Reporters:
    """Collective. The receivers of reports on epochs and steps; none on ranks other than 0. Raises: ConfigError."""
    comm, progress, folder = session.comm, session.progress, settings.records

    def open_on_rank_zero() -> Reporters:
        epochs, steps = JsonLines(folder / "scores.jsonl"), StepLines(folder / "steps.jsonl")
        epochs.go_on(progress.epoch, progress.report)
        current = progress.current
        steps.go_on(progress.epoch + 1, 0 if current is None else progress.step - current.first_step)
        best = BestReporter(session)
        reporters: list[Reporter] = [epochs, Rows(session, settings.run.num_epochs), best]
        if is_notebook():
            reporters.append(GrowingTable(lambda: table_of(session)))
        if settings.schedule.learning_rate_file is not None:
            path = Path(settings.schedule.learning_rate_file)
            reporters.append(LearningRateFile(path, progress.history, epoch_meta, epoch_rate))
        trackers = open_trackers(settings, session)
        made = [make(settings) for make in REPORTERS.values()]
        reporters += [reporter for reporter in made if reporter is not None]
        evaluations = EvaluationLines(folder / "evaluations.jsonl")
        evaluations.go_on({record.step for record in progress.evaluations})
        receivers = [evaluations.evaluation, best.evaluation, *trackers.evaluations]
        return Reporters(reporters, [steps.step, *trackers.steps], trackers.services, receivers)

    return together(comm, lambda: open_on_rank_zero() if comm.rank == 0 else Reporters(), name="open_reporters")


def table_of(session: Session) -> str:
    """The epochs so far as HTML."""
    best = session.best.measure.best(session.best.records(session.progress))
    return epoch_table(session.progress.history, None if best is None else best.epoch)


class Rows:
    """Logs two rows about every epoch: its scores, and what it took."""

    def __init__(self, session: Session, num_epochs: int) -> None:
        self._session = session
        self._num_epochs = num_epochs
        self._seconds: list[float] = []

    def epoch(self, report: EpochReport) -> None:
        measure, history = self._session.best.measure, self._session.best.records(self._session.progress)
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
        best, name = keeper.measure.best(records), keeper.measure.name(records)
        if best is not None and name is not None and best.at_step == report.global_step:
            log.info(
                f"epoch {best.epoch}, step {report.step}, is the best so far: {name} {best.scores[name]:.4g}, "
                f"{keeper.measure.direction(name)}"
            )
        keeper.update(records)

    def epoch(self, report: EpochReport) -> None:
        history, measure = self._session.best.records(self._session.progress), self._session.best.measure
        best, name = measure.best(history), measure.name(history)
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


def open_trackers(settings: Settings, session: Session) -> Reporters:
    """The experiment trackers that the config asks for. Raises: ConfigError."""
    trackers: list[Reporter] = []
    boards: list[TensorBoard] = []
    if settings.trackers.writes_tensorboard:
        parameters = session.learner.state.named_parameters if settings.trackers.tensorboard_histograms else None
        boards.append(TensorBoard(settings.records / "tensorboard", session.progress.step, parameters))
    track_epoch = as_function(settings.trackers.track_epoch, "track_epoch")
    if track_epoch is not None:
        trackers.append(BestEffortReporter("track_epoch", TrackEpoch(track_epoch)))
    tolerant = [BestEffortReporter("use_tensorboard", board) for board in boards]
    return Reporters(
        steps=[board.step for board in boards],
        services=[*tolerant, *trackers],
        evaluations=[board.evaluation for board in boards],
    )


@contextmanager
def open_services(settings: Settings, session: Session, start: Start) -> Iterator[list[BackgroundTracker]]:
    """The experiment trackers of the config on rank 0, which end with the block; none on the other ranks."""
    services = settings.trackers.factories if session.comm.rank == 0 else []
    metrics_file = settings.trackers.metrics_file if session.comm.rank == 0 else None
    if not services and metrics_file is None:
        yield []
        return
    folder, progress = settings.records.absolute(), session.progress
    name = models_of(folder).name if folder == models_of(folder) else f"{models_of(folder).name}/{Path(settings.run.model).name}"
    ids = RunIds(folder)
    known = ids.read() if progress.step else {}  # a training that starts from scratch is a new run
    git = git_state(settings.files[0].absolute().parent if settings.files else folder) if services else {}
    trackers: list[BackgroundTracker] = []

    def begin(tracker: BackgroundTracker, run: RunDescription) -> None:
        tracker.begin(run)
        trackers.append(tracker)

    status: Status = "failed"
    try:  # from here on, as those that have begun end in any case
        for number, service in enumerate(services):
            is_first = number == [other.label for other in services].index(service.label)
            label = service.label if is_first else f"{service.label} ({number})"
            config = config_values(start.settings)
            run = RunDescription(name, folder, known.get(label), progress.step, config, git, start)
            begin(BackgroundTracker(label, service.make, partial(ids.store, label)), run)
        if metrics_file is not None:
            run = RunDescription(name, folder, None, progress.step, {}, {}, start)
            begin(BackgroundTracker("metrics_file", lambda: MetricsFile(Path(metrics_file))), run)
        yield trackers
        status = "finished"
    except Stopped:
        status = "stopped"
        raise
    finally:
        session.watchdog.beat("waiting for the trackers", "unhurried")
        is_page_due = bool(services) and status in ("finished", "stopped")
        files = write_artifacts(folder, status) if is_page_due else {}
        if settings.trackers.track_best_model and is_page_due and (model := _best_model(settings, session)) is not None:
            files = {**files, "model": model}
        for tracker in trackers:
            tracker.request_end(status, files)
        deadline = time.monotonic() + (FOR_MODELS if "model" in files else PATIENCE[status])
        for tracker in trackers:
            tracker.wait(deadline - time.monotonic())


FOR_MODELS = 600.0
"""Seconds that trackers may take at the end to store a model."""


def _best_model(settings: Settings, session: Session) -> Path | None:
    """The file with the model of the best epoch, if it is kept."""
    best = session.best.summary(session.best.records(session.progress))
    return None if best is None or best["file"] is None else Path(settings.run.model).absolute().parent / best["file"]
