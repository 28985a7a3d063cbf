"""The experiment trackers of a training, from its begin to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.config.references import as_function
from hvdtrain.plugins.trackers import receivers
from hvdtrain.plugins.trackers.keys import TrackerKeys
from hvdtrain.plugins.trackers.metrics_file import MetricsFile
from hvdtrain.plugins.trackers.services import ARTIFACTS, RunDescription, config_values, git_state
from hvdtrain.report.ends import Status
from hvdtrain.report.epoch import Reporter
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.records import models_of
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session


@contextmanager
def open_trackers(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """The receivers of reports that the config asks for, which end with the block."""
    keys = settings.of(TrackerKeys)
    trackers: list[Reporter] = []
    boards: list[receivers.TensorBoard] = []
    if keys.writes_tensorboard:
        parameters = session.learner.state.named_parameters if keys.tensorboard_histograms else None
        boards.append(receivers.TensorBoard(settings.records / "tensorboard", session.progress.step, parameters))
    track_epoch = as_function(keys.track_epoch, "track_epoch")
    if track_epoch is not None:
        trackers.append(receivers.BestEffortReporter("track_epoch", partial(receivers.call_with_metrics, track_epoch)))
    tolerant = [receivers.BestEffortReporter("use_tensorboard", board.epoch) for board in boards]
    with _open_services(settings, keys, session, start) as services:
        yield Reporters(
            services,
            [*(board.step for board in boards), *(service.step for service in services)],
            [*tolerant, *trackers],
            [*(board.evaluation for board in boards), *(service.evaluation for service in services)],
        )


@contextmanager
def _open_services(
    settings: Settings, keys: TrackerKeys, session: Session, start: Start
) -> Iterator[list[receivers.BackgroundTracker]]:
    services = keys.factories
    metrics_file = keys.metrics_file
    if not services and metrics_file is None:
        yield []
        return
    if services and "report" in ARTIFACTS and find_spec("plotly") is None:
        log.warning("trackers: no report page will be kept with the run, since plotly is not installed (pip install plotly)")
    folder = settings.records.absolute()
    progress = session.progress
    name = models_of(folder).name if folder == models_of(folder) else f"{models_of(folder).name}/{Path(settings.run.model).name}"
    ids = receivers.RunIds(folder)
    run_ids = ids.read() if progress.step else {}  # a training that starts from scratch is a new run
    git = git_state(settings.files[0].absolute().parent if settings.files else folder) if services else {}
    trackers: list[receivers.BackgroundTracker] = []

    def begin(tracker: receivers.BackgroundTracker, run: RunDescription) -> None:
        tracker.begin(run)
        trackers.append(tracker)

    status: Status = "failed"
    try:  # from here on, as those that have begun end in any case
        for number, service in enumerate(services):
            is_first = number == [candidate.label for candidate in services].index(service.label)
            label = service.label if is_first else f"{service.label} ({number})"
            config = config_values(start.settings)
            run = RunDescription(name, folder, run_ids.get(label), progress.step, config, git, start)
            begin(receivers.BackgroundTracker(label, service.make, partial(ids.store, label)), run)
        if metrics_file is not None:
            run = RunDescription(name, folder, None, progress.step, {}, {}, start)
            begin(receivers.BackgroundTracker("metrics_file", lambda: MetricsFile(Path(metrics_file))), run)
        yield trackers
        status = "finished"
    except Stopped:
        status = "stopped"
        raise
    finally:
        session.watchdog.beat("waiting for the trackers", "unhurried")
        is_page_due = bool(services) and status in ("finished", "stopped")
        files = receivers.write_artifacts(folder, status) if is_page_due else {}
        if keys.track_best_model and is_page_due and (model := _best_model(settings, session)) is not None:
            files = {**files, "model": model}
        for tracker in trackers:
            tracker.request_end(status, files)
        deadline = time.monotonic() + (FOR_MODELS if "model" in files else receivers.PATIENCE[status])
        for tracker in trackers:
            tracker.wait(deadline - time.monotonic())


FOR_MODELS = 600.0
"""Seconds that trackers may take at the end to store a model."""


def _best_model(settings: Settings, session: Session) -> Path | None:
    """The file with the model of the best epoch, if it is kept."""
    best = session.best.summary(session.best.records(session.progress))
    return None if best is None or best["file"] is None else Path(settings.run.model).absolute().parent / best["file"]
