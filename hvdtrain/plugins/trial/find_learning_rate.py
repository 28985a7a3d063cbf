"""The task find_learning_rate: train with a rate that grows from update to update, and suggest one from the losses.

(After Smith, 2017, "Cyclical Learning Rates for Training Neural Networks".) A ramp uses the real engine, so that gradient
accumulation, clipping, precision and the exchange between the ranks are those of the training. It saves no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, isfinite, log10
from pathlib import Path

from hvdtrain.checkpoint.saver_base import SaverBase
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.engine import Engine
from hvdtrain.learner.reducers import scale_learning_rate
from hvdtrain.plugins.trial.keys import TrialKeys
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.runtime.log import silence
from hvdtrain.runtime.scores import Scores
from hvdtrain.settings import Settings
from hvdtrain.start_up.announce import announce, gather_hosts
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.limits import open_limits
from hvdtrain.start_up.without_files import writing_nothing
from hvdtrain.training.callbacks import Callbacks, Training
from hvdtrain.training.limits import Rates, TrainingLimits
from hvdtrain.training.session import Session
from hvdtrain.training.step_log import StepLog, StepReport

FEWEST = 10
"""The number of updates before which a ramp does not end: single losses say little."""


@dataclass(frozen=True)
class Ramp:
    """A rate that grows by the same factor in every step.

    Attributes:
        steps: the number of steps, those of accumulated gradients included.
    """

    lowest: float
    highest: float
    steps: int

    def rate(self, step: int) -> float:
        """The rate of a step, counted from 0; later ones keep the highest.

        >>> Ramp(0.01, 1.0, 3).rate(1)
        0.1
        """
        share = min(step, self.steps - 1) / (self.steps - 1)
        return float(f"{self.lowest * (self.highest / self.lowest) ** share:.12g}")


@dataclass(frozen=True)
class Suggestion:
    """What a ramp says.

    Attributes:
        rate: the suggested one.
        steepest: where the loss falls fastest.
        lowest: where the loss is lowest.
    """

    rate: float
    steepest: float
    lowest: float


class RampLog(StepLog):
    """Keeps this rank's scores of every step, and ends the ramp when it is over or the loss explodes. Also a callback."""

    def __init__(self, ramp: Ramp) -> None:
        super().__init__()
        self._ramp = ramp
        self._smoothed = self._best = self._start = 0.0
        self.scores: list[Scores] = []
        self.ended_by: str | None = None

    def step(self, report: StepReport) -> None:
        if len(self.scores) < self._ramp.steps and self.ended_by is None:
            scores = report.meter.take_scores()
            self.scores.append(scores)
            self._watch(loss_of(scores))

    def on_step_end(self, training: Training) -> None:
        if self.ended_by is not None:
            training.stop(self.ended_by)

    def _watch(self, loss: float | None) -> None:
        """Whether the loss has risen above its first values by twice as much as it had fallen."""
        done = len(self.scores)
        if loss is not None:
            weight = max(0.1, 1 / done)
            self._smoothed += weight * (loss - self._smoothed)
            if done <= FEWEST:
                self._start = self._best = self._smoothed
            self._best = min(self._best, self._smoothed)
        limit = self._start + 2 * max(self._start - self._best, 0.1 * abs(self._start))
        if done > FEWEST and not self._smoothed <= limit:  # also if it is not a number
            self.ended_by = "the loss explodes"
        elif done >= self._ramp.steps:
            self.ended_by = "the ramp is over"


def loss_of(scores: Scores) -> float | None:
    """The minimized loss, per element: the means of all losses, with their scales; None: there are no elements."""
    means = scores.means()
    scales = scores.scales()
    return sum(scale * means[name] for name, scale in scales.items()) if scales else None


def find_learning_rate(settings: Settings) -> None:
    """Collective. Train with a growing rate, draw the losses, and suggest a rate. Raises: HvdtrainError."""
    lowest, highest, updates = settings.of(TrialKeys).learning_rate_ramp
    with open_session(writing_nothing(settings), "dry_run") as session:
        # Of the config's limits only the size of updates: nothing else ends a ramp.
        steps_per_update = open_limits(settings, session.epochs).steps_per_update
        limits = TrainingLimits(1_000_000, steps_per_update=steps_per_update, finite=False)
        announce(settings, session, limits, gather_hosts(session))
        first = session.progress.step
        epoch = session.progress.epoch + 1
        rounds = limits.steps_per_update(epoch, float(epoch - 1), first)
        ramp = Ramp(lowest, highest, int(updates) * rounds)
        log.info(f"learning rates from {lowest:g} to {highest:g} in {int(updates)} updates; no model is saved")
        mine = run_ramp(settings, session, ramp, first, limits)
        gathered = session.comm.gather(mine, name="ramp")
        points = merge(ramp, gathered, rounds)
        folder = settings.records
        on_rank_zero(session.comm, lambda: report(points, folder, updates=int(updates)), name="ramp_report")


def run_ramp(settings: Settings, session: Session, ramp: Ramp, first: int, limits: TrainingLimits) -> list[Scores]:
    """Collective. This rank's scores of every step."""
    factor = scale_learning_rate(1.0, settings.reduce.learning_rate_scale, session.comm.size)
    rates = Rates(lambda *_: ramp.lowest, lambda step, *_: factor * ramp.rate(step - first))
    steps = RampLog(ramp)
    tried = replace(session, feeds=session.feeds[:1], saver=SaverBase())
    with silence():
        try:
            Engine(tried, rates, limits, Reporters(), steps, callbacks=Callbacks([steps])).run()
        except Stopped:  # as RampLog requested, on all ranks
            pass
    return steps.scores


@dataclass(frozen=True)
class Point:
    """An update of a ramp: its rate, and the loss of all ranks before it."""

    rate: float
    loss: float


def merge(ramp: Ramp, by_rank: Sequence[Sequence[Scores]], rounds: int) -> list[Point]:
    """The points of a ramp, from each rank's scores of every step.

    Args:
        rounds: the number of steps of an update.
    """
    points = []
    for begin in range(0, min(map(len, by_rank)) - rounds + 1, rounds):
        steps = [scores for of_rank in by_rank for scores in of_rank[begin : begin + rounds]]
        loss = loss_of(Scores.merge(steps))
        if loss is not None:
            points.append(Point(ramp.rate(begin + rounds - 1), loss))
    return points


def smooth(points: Sequence[Point]) -> list[float]:
    """The losses, each averaged with its neighbours (a Gaussian window, which shifts nothing), up to the first one that is not
    finite."""
    finite = next((number for number, point in enumerate(points) if not isfinite(point.loss)), len(points))
    width = max(1.0, len(points) / 30)
    result = []
    for number in range(finite):
        window = range(max(0, number - int(3 * width)), min(finite, number + int(3 * width) + 1))
        weights = [exp(-0.5 * ((near - number) / width) ** 2) for near in window]
        result.append(sum(weight * points[near].loss for weight, near in zip(weights, window, strict=True)) / sum(weights))
    return result


def suggest(points: Sequence[Point], losses: Sequence[float]) -> Suggestion | None:
    """The rate at which the loss falls fastest, but at most a third of that at which it is lowest, where it is about to rise.

    Args:
        losses: smoothed.

    Returns:
        None: the loss does not fall.
    """
    if len(losses) < FEWEST:
        return None
    lowest = min(range(len(losses)), key=losses.__getitem__)
    slopes = [later - earlier for earlier, later in zip(losses[:lowest], losses[1 : lowest + 1], strict=True)]
    if not slopes or min(slopes) >= 0 or losses[0] - losses[lowest] < 0.01 * abs(losses[0]):
        return None
    steepest = points[min(range(len(slopes)), key=slopes.__getitem__)].rate
    return Suggestion(float(f"{min(steepest, points[lowest].rate / 3):.1g}"), steepest, points[lowest].rate)


def report(points: Sequence[Point], folder: Path, updates: int) -> None:
    """Log the losses as a chart and the suggestion, and write them next to where the model will be. Raises: ConfigError."""
    losses = smooth(points)
    for line in chart(points, losses):
        log.result(line)
    suggestion = suggest(points, losses)
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "points": [{"rate": point.rate, "loss": point.loss if isfinite(point.loss) else None} for point in points],
        "smoothed": losses,
        "suggestion": None if suggestion is None else asdict(suggestion),
    }
    file = folder / "find_learning_rate.json"
    file.write_text(json.dumps(data) + "\n")
    files = [file, *draw(points, losses, suggestion, folder / "find_learning_rate.png")]
    if len(points) < updates:
        log.result(f"find_learning_rate: ended after {len(points)} of {updates} updates, as the loss explodes there")
    if suggestion is None:
        log.result(
            "find_learning_rate: no rate is suggested, as the loss does not fall at any (other rates: ++learning_rate_ramp "
            "'[1e-8, 0.1, 200]', which are the lowest one, the highest one and the number of updates)"
        )
    else:
        log.result(
            f"find_learning_rate: learning_rate = {suggestion.rate:g} (the loss falls fastest at {suggestion.steepest:.1e} and "
            f"is lowest at {suggestion.lowest:.1e})"
        )
    log.result(f"find_learning_rate: {' and '.join(map(str, files))}")


COLUMNS, ROWS = 64, 12


def chart(points: Sequence[Point], losses: Sequence[float]) -> list[str]:
    """The smoothed losses over the rate, as lines of text.

    >>> rising = [Point(10.0 ** power, float(power)) for power in range(3)]
    >>> print("\\n".join(line.rstrip() for line in chart(rising, [0.0, 1.0, 2.0])[:2]))
           2 |                                                               *
             |
    """
    if len(losses) < 2:
        return []
    low = min(losses)
    high = max(losses[: losses.index(low) + 1])
    high = high if high > low else max(losses)
    rows = [[" "] * COLUMNS for _ in range(ROWS)]
    begin, end = log10(points[0].rate), log10(points[len(losses) - 1].rate)
    for point, loss in zip(points, losses, strict=False):
        column = round((log10(point.rate) - begin) / (end - begin) * (COLUMNS - 1))
        share = (min(loss, high) - low) / ((high - low) or 1.0)
        rows[round((1 - share) * (ROWS - 1))][column] = "*"
    labels = [f"{high:8.3g}", *[" " * 8] * (ROWS - 2), f"{low:8.3g}"]
    lines = [f"{label} |{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    first, last = f"{points[0].rate:.0e}", f"{points[len(losses) - 1].rate:.0e}"
    return [*lines, f"{'loss':>8} +{'-' * COLUMNS}", f"{'rate':>8}  {first}{last:>{COLUMNS - len(first)}}"]


def draw(points: Sequence[Point], losses: Sequence[float], suggestion: Suggestion | None, file: Path) -> list[Path]:
    """Draw the losses with matplotlib, if it is installed; return the file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("find_learning_rate: no picture, as matplotlib is missing (pip install matplotlib)")
        return []
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    rates = [point.rate for point in points]
    axes.plot(rates, [point.loss for point in points], color="#98a2ad", linewidth=0.6, label="of each update")
    axes.plot(rates[: len(losses)], losses, color="#0f6cbd", label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion.rate, color="#d8590b", linestyle="--", label=f"suggested: {suggestion.rate:g}")
    if losses:
        margin = 0.1 * (max(losses[0], min(losses)) - min(losses)) or 1.0
        axes.set_ylim(min(losses) - margin, losses[0] + 5 * margin)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    return [file]
