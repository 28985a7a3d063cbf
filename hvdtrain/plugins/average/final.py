"""The averages that a training makes at its end (key `average_checkpoints`): evaluated like an epoch, and compared with its
models."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.loader import share_model
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.data.feed import Feed
from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import BY_CTRL_C, TO_BE_CONTINUED, CheckpointError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.plugins.average.averages import make_average, source_names, with_statistics, write_model_file
from hvdtrain.plugins.average.keys import AverageKeys
from hvdtrain.plugins.average.rules import AverageRule, Averages, parse_averages, select, shortfall
from hvdtrain.plugins.average.statistics import recompute_statistics
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.scores import name_scores, text
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, minimized_in, with_totals
from hvdtrain.settings import Settings
from hvdtrain.start_up.checkpoints import checkpoint_folder
from hvdtrain.training.average import Average
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.session import Session
from hvdtrain.training.step_log import StepLog
from hvdtrain.training.vote import TASK_INTERVAL, Requests, Vote

FILE = "averages.json"
"""The file with the averages and their scores, next to the model."""

TRAINED = "trained weights"
"""The model of the last epoch without the moving average of `ema_decay`."""


@dataclass(frozen=True)
class AverageScores:
    """A model that was evaluated after the last epoch.

    Attributes:
        name: such as 'best-5', or `TRAINED`.
        file: the name of its file next to the model; None: it has none.
        of: the names of the files that it is the average of.
        epoch: the last epoch of the training.
        scores: by name, such as 'dev_loss_ce'.
        made_from: a checksum of the training's scores and of how the average is made. With another one, it is made anew.
    """

    name: str
    file: str | None
    of: list[str]
    epoch: int
    scores: Mapping[str, float]
    made_from: str


def rules_of(settings: Settings) -> list[AverageRule]:
    """What a training averages at its end."""
    if settings.run.overfit_batches is not None:
        return []
    return parse_averages(settings.of(AverageKeys).average_checkpoints)


def averages_of(settings: Settings) -> Averages | None:
    """What keeps the models that the averages of a config need."""
    rules = rules_of(settings)
    has_within = settings.evaluation.serves("best_model")
    save_interval = settings.saving.save_interval
    return Averages(rules, settings.measure, settings.run.num_epochs, save_interval, has_within) if rules else None


def make_averages(settings: Settings, session: Session, step_log: StepLog) -> list[Average]:
    """Collective. Make and evaluate the averages of a training that has ended; return those of the config.

    What an earlier start of the program has made of the same checkpoints is kept.

    Raises:
        CheckpointError: models are missing, or the disk is full.
        Stopped: a signal came; the same command makes the averages.
    """
    rules = rules_of(settings)
    if not rules or not session.progress.history:
        return []
    checkpoints = checkpoint_folder(settings)
    folder = settings.records
    epoch = session.progress.epoch
    earlier = on_rank_zero(session.comm, lambda: _read(folder / FILE, epoch), name="averages.known")
    averages: list[AverageScores] = []
    feeds = session.epochs.feeds(session.feeds, epoch)
    session.learner.begin_epoch(epoch, session.progress.step)  # this start of the program may have trained nothing
    with stop_vote(session) as after_step:
        evaluator = Evaluator(session, feeds, step_log, after_step)
        for rule in rules:
            chosen = on_rank_zero(session.comm, partial(_choose, rule, session, checkpoints), name="averages.choose")
            averages.append(_average(settings, rule, chosen, earlier.get(rule.name), evaluator, session, checkpoints))
        if settings.learner.ema_decay is not None:
            made_from = evaluator.made_from(TRAINED)
            trained = earlier.get(TRAINED)
            if trained is None or trained.made_from != made_from:
                trained = AverageScores(TRAINED, None, [], epoch, evaluator.scores(epoch), made_from)
            averages.append(trained)
    on_rank_zero(session.comm, lambda: _write(folder / FILE, averages), name="averages.write")
    for line in comparison(
        session.best.records(session.progress), averages, session.best.measure, settings.learner.ema_decay is not None
    ):
        log.result(line)
    models = checkpoints.prefix.parent.absolute()
    return [Average(each.name, each.scores, None if each.file is None else models / each.file) for each in averages]


def _choose(rule: AverageRule, session: Session, checkpoints: CheckpointFolder) -> list[Checkpoint]:
    chosen = select(rule, checkpoints, session.best.records(session.progress), session.best.measure)
    if (missing := shortfall(rule, chosen)) is not None:
        log.warning(f"average_checkpoints: {rule.name}: {missing}: the average is of these")
    return chosen


def _average(
    settings: Settings,
    rule: AverageRule,
    chosen: Sequence[Checkpoint],
    earlier: AverageScores | None,
    evaluator: Evaluator,
    session: Session,
    checkpoints: CheckpointFolder,
) -> AverageScores:
    """Collective. Make and evaluate one average, unless `earlier` is what would be made."""
    epoch = session.progress.epoch
    framework = FRAMEWORKS[settings.run.backend]
    suffix = settings.saving.checkpoint_format or framework.suffix
    file = checkpoints.prefix.with_name(f"{checkpoints.prefix.name}.{rule.name}.{suffix}")
    sources = source_names(rule, chosen)
    made_from = evaluator.made_from(repr(rule))
    exists = on_rank_zero(session.comm, file.exists, name="averages.exists")
    if earlier is not None and (earlier.of, earlier.made_from) == (sources, made_from) and exists:
        return earlier
    session.watchdog.beat(f"averaging {rule.name}", "saving")
    state = session.learner.state
    contents = dict[str, Any]()

    def make() -> None:
        contents.update(make_average(rule, chosen, framework))
        write_model_file(file, contents, framework)

    def rewrite() -> None:
        write_model_file(file, with_statistics(contents, state.model_tensors()), framework)

    on_rank_zero(session.comm, make, name="averages.make")
    with state.other_model(contents["model"] if session.comm.rank == 0 else state.model_tensors()):
        share_model(session.comm, state)  # other hosts may not have the files
        if rule.recompute_statistics:
            layers = recompute_statistics(session.comm, session.learner, session.watchdog, evaluator.train, epoch)
            if not layers:
                log.warning("average_checkpoints.recompute_statistics: the model has no BatchNorm layers")
            on_rank_zero(session.comm, rewrite, name="averages.rewrite")
        on_rank_zero(session.comm, lambda: checkpoints.copy_to_mirror(file), name="averages.mirror")
        scores = evaluator.scores(epoch)
    return AverageScores(rule.name, file.name, sources, epoch, scores, made_from)


@contextmanager
def stop_vote(session: Session) -> Iterator[Callable[[], None]]:
    """Collective. Yields a function for all ranks to call after every step: it raises Stopped if a signal came to any of them."""
    vote = Vote(session.comm, session.learner.numbers, TASK_INTERVAL)

    def requests() -> Requests:
        reason = session.interrupt.reason
        return Requests(stop=int(reason is not None and reason != "SIGINT"), stop_by_hand=int(reason == "SIGINT"))

    def after_step() -> None:
        wanted = vote.step(requests)
        if wanted is not None and (wanted.stop or wanted.stop_by_hand):
            vote.finish()
            raise Stopped(
                "stopped while averages of checkpoints are evaluated; all epochs are trained, and the same command makes them",
                BY_CTRL_C if wanted.stop_by_hand else TO_BE_CONTINUED,
            )

    yield after_step
    vote.finish()


class Evaluator:
    """Evaluates the present model on all datasets of the training but train.

    Args:
        feeds: those of the last epoch; train comes first.
        after_step: called by all ranks after each step.
    """

    def __init__(self, session: Session, feeds: Sequence[Feed], step_log: StepLog, after_step: Callable[[], object]) -> None:
        self._session = session
        self.train, *self._feeds = feeds
        self._step_log = step_log
        self._after_step = after_step

    def scores(self, epoch: int) -> dict[str, float]:
        """Collective. The scores by name, such as 'dev_loss_ce'."""
        session = self._session
        scores: dict[str, float] = {}
        for feed in self._feeds:
            means = evaluate(
                session.comm, session.learner, session.watchdog, feed, epoch, after_step=self._after_step, step_log=self._step_log
            )
            scores |= name_scores(feed.name, means)
        return with_totals(scores, minimized_in(session.progress.history))

    def made_from(self, subject: str) -> str:
        """A checksum of the training that has ended, and of what is evaluated: two trainings differ in their scores."""
        records = [asdict(record) for record in self._session.progress.records]
        text = json.dumps([records, [feed.name for feed in self._feeds], subject], sort_keys=True)
        return f"{zlib.crc32(text.encode()):08x}"


def comparison(
    records: Sequence[EpochRecord], averages: Sequence[AverageScores], measure: Measure, has_moving_average: bool
) -> Iterator[str]:
    """The lines of the log about the averages, and about which model is the best.

    Args:
        records: of the epochs, and of evaluations within them.
        has_moving_average: whether the models of the epochs are moving averages (`ema_decay`).
    """
    for average in averages:
        shown = {name: value for name, value in average.scores.items() if not name.startswith("train_")}
        origin = f"the average of {', '.join(average.of)}" if average.of else "without the moving average"
        yield f"{average.name}: {text({name.replace('_loss_', ' '): value for name, value in shown.items()})} ({origin})"
    best = measure.best(records)
    name = measure.name(records)
    if best is None or name is None or not all(name in average.scores for average in averages):
        return
    of = " with the moving average" if has_moving_average else ""
    place = f"epoch {best.epoch}" if best.at_step is None else f"epoch {best.epoch}, step {best.at_step}"
    candidates = {f"the last epoch, {records[-1].epoch},{of}": records[-1].scores.get(name, math.nan)}
    if best is not records[-1]:
        candidates[f"the best one, {place},{of}"] = best.scores[name]
    candidates |= {average.name if average.of else "the last epoch without it": average.scores[name] for average in averages}
    sign = -1 if measure.is_higher_better(name) else 1
    finite = {label: value for label, value in candidates.items() if math.isfinite(value)}
    if not finite:
        return
    winner = min(finite, key=lambda label: sign * finite[label])
    others = "; ".join(f"{label.rstrip(',')}: {value:.6g}" for label, value in candidates.items() if label != winner)
    yield f"best of all, by {name}, {measure.direction(name)}: {winner.rstrip(',')}: {finite[winner]:.6g} ({others})"


def _read(path: Path, epoch: int) -> dict[str, AverageScores]:
    """By name, the averages that the file has, if they are of the same last epoch."""
    try:
        averages = [AverageScores(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
        present = [average for average in averages if average.epoch == epoch]
        numbers = [{name: float(value) for name, value in average.scores.items()} for average in present]
    except (OSError, ValueError, TypeError):
        return {}
    return {average.name: replace(average, scores=scores) for average, scores in zip(present, numbers, strict=True)}


def _write(path: Path, averages: Sequence[AverageScores]) -> None:
    """Write the file atomically, if it has changed. Raises: CheckpointError."""
    entries = [asdict(average) for average in averages]
    for entry in entries:
        entry["scores"] = {name: value if math.isfinite(value) else str(value) for name, value in entry["scores"].items()}
    text = json.dumps(entries, indent=1) + "\n"
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        write_atomically(path, text)
    except OSError as error:
        raise CheckpointError(f"{path}: expected to write the scores of the averages, got: {error}") from None
