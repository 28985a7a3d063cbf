"""The figures of a report as plain data (curves, bars and cells), which page.js and pictures.py draw."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy

from hvdtrain.plugins.report.runs import Run
from hvdtrain.plugins.report.slow_ranks import own_seconds

Values = list[float | None]
"""Numbers; None for those that are missing or not finite."""

MAX_POINTS = 1000
"""The maximum of points of a curve within epochs, about the columns of a wide screen. Of more, the extreme ones are kept."""

ACTIVITIES = ("compute", "communication", "parameter sync", "data wait", "evaluation", "saving")
"""What ranks spend their time on, in the order of the colors. Other activities follow; `rest` is grey."""

MOST_RANKS = 64
"""The most ranks that figures show one by one; of more ranks, the slowest ones."""

BEFORE = "earlier start"
"""The time of a resumed epoch before it was stopped: what it was spent on is not recorded."""

DASHES = ("solid", "dash", "dashdot")
"""Line styles: with several runs, for the datasets or values of a run."""

COLORS = 12
"""The number of colors of page.css."""

GREY = -1
"""The color of curves and bars that stand for neither a run, nor a dataset, nor an activity."""


@dataclass(frozen=True)
class Curve:
    """One curve of a panel.

    Attributes:
        x: the same positions as epochs, steps and seconds: `{"epoch": ..., "step": ..., "seconds": ...}`.
        y: the values.
        color: the number of its color; the same in all figures for the same run or, with a single run, the same dataset.
        dash: "solid", "dash", "dot" or "dashdot".
        look: "line" with a mark at every point, "steps" without marks, "faint" behind a smoothed curve. A single point is only
            visible with a mark.
        best: the index of the best value in `y`, which gets a mark.
        run: the number of its run.
        part: what it is of that run, such as a dataset: curves of the same run and part share one entry in the legend.
        missing: of values that are not finite, the position on each x axis, and `text`.
    """

    name: str
    x: Mapping[str, Values]
    y: Values
    color: int
    dash: str = "solid"
    look: str = "line"
    best: int | None = None
    run: int = 0
    part: str = ""
    missing: Sequence[Mapping[str, float | str | None]] = ()


@dataclass(frozen=True)
class Panel:
    """Curves with a common y axis.

    Attributes:
        unit: "" for a number, "%" for a share, "/s" for large numbers such as speeds, "B" for bytes.
        from_zero: whether the axis begins at zero.
    """

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    from_zero: bool = False


@dataclass(frozen=True)
class Bars:
    """Stacked bars, one for each of `labels`; `series` are (name, color, seconds of each label); `of_runs`: labels are runs."""

    labels: Sequence[str | int]
    series: Sequence[tuple[str, int, list[float]]]
    axis: str
    horizontal: bool = False
    of_runs: bool = False


@dataclass(frozen=True)
class Heat:
    """Cells of ranks (rows) and epochs (columns).

    Attributes:
        late: how much longer than the median rank a rank computed and waited for data, as a share of the median.
        own: the seconds that a rank computed and waited for data.
    """

    epochs: list[int]
    ranks: list[int]
    late: list[Values]
    own: list[Values]


@dataclass(frozen=True)
class Scatter:
    """Scores over the values of keys, a point for each run.

    Attributes:
        names: of the runs.
        keys: by key, its value in each run as text.
        scores: by name, the score of each run.
    """

    names: Sequence[str]
    keys: Mapping[str, Sequence[str]]
    scores: Mapping[str, Values]


@dataclass(frozen=True)
class Figure:
    """A figure: panels of curves above each other with a common x axis, bars, cells, or points.

    Attributes:
        name: identifies the figure in the page; also the file name of its picture.
        note: a sentence below the title.
        wide: whether it takes the whole width of the page.
        scores: whether it shows scores, to which the page's logarithmic scale applies.
        hidden: the parts of curves that the page hides at first.
    """

    name: str
    title: str
    note: str = ""
    panels: Sequence[Panel] = ()
    bars: Bars | None = None
    heat: Heat | None = None
    scatter: Scatter | None = None
    wide: bool = False
    scores: bool = False
    hidden: Sequence[str] = ()


FEW_RUNS = 3
"""With more runs than this, the page shows only one dataset's scores at first, and no raw values behind smoothed curves."""


def score_figures(runs: list[Run]) -> list[Figure]:
    """A figure for each loss or error; the one that determines the best epoch comes first, above the learning rate."""
    names = sorted({name for run in runs for epoch in run.epochs for name in epoch["scores"]})
    names += sorted({f"train_loss_{split(name)[1]}" for run in runs for line in run.steps for name in line.get("scores", ())})
    measure = next((run.measure for run in runs if run.measure), None)
    usual, first = split(measure) if measure else ("", "")
    pairs = [split(name) for name in names]
    losses = sorted(dict.fromkeys(loss for _, loss in pairs), key=lambda loss: loss != first)
    others = sorted({dataset for dataset, _ in pairs} - {"train"})
    colors = {dataset: number for number, dataset in enumerate(["train", *others])}
    figures = []
    for loss in losses:
        datasets = {dataset: color for dataset, color in colors.items() if (dataset, loss) in pairs}
        curves = [curve for number, run in enumerate(runs) for curve in _score_curves(run, number, len(runs), loss, datasets)]
        main = loss == losses[0]
        panels = [Panel(loss, curves), *([learning_rates(runs)] if main else [])]
        evaluated = [name for name in (usual, *datasets) if name in datasets and name != "train"]
        shown = evaluated[0] if evaluated else "train"
        hidden = [name for name in datasets if name != shown] if len(runs) > FEW_RUNS else []
        note = _best_note(runs, loss, datasets)
        figures.append(Figure(f"score {loss}", loss, note, panels, wide=main, scores=True, hidden=hidden))
    return figures


def _score_curves(run: Run, number: int, runs: int, loss: str, datasets: Mapping[str, int]) -> Iterable[Curve]:
    for dataset, place in datasets.items():
        name = f"{dataset}_loss_{loss}" if dataset else loss
        color = number if runs > 1 else place
        dash = ("dot" if dataset == "train" else DASHES[(place - 1) % 3]) if runs > 1 else "solid"
        label = f"{run.name} {dataset}".strip() if runs > 1 else dataset or loss
        part = dataset or loss
        epochs = [epoch for epoch in run.epochs if name in epoch["scores"]]
        if dataset == "train" and (not epochs or any(float(line["progress"]) < 1 for line in run.steps)):
            within = _step_curves(run, f"{label}, within epochs", partial(_score_of, f"train_loss_{loss}", loss), color, dash)
            yield from (replace(curve, run=number, part=part) for curve in within)
        if dataset != "train" and run.evaluations:
            score = partial(_score_of, name, name)
            within = _step_curves(run, f"{label}, within epochs", score, color, smooth=False, lines=run.evaluations)
            yield from (replace(curve, run=number, part=part) for curve in within)
        if epochs:
            values = [finite(epoch["scores"][name]) for epoch in epochs]
            has_star = dataset != "train" and (runs == 1 or name == run.measure)
            best = run.best(name) if has_star else None
            star = [epoch["epoch"] for epoch in epochs].index(best[0]) if best else None
            x = middles(run, epochs) if dataset == "train" else positions(run, epochs)
            missing = [
                {**{axis: at[index] for axis, at in x.items()}, "text": str(epoch["scores"][name])}
                for index, epoch in enumerate(epochs)
                if values[index] is None
            ]
            yield Curve(label, x, values, color, dash, best=star, run=number, part=part, missing=missing)


def _score_of(name: str, loss: str, line: Mapping[str, Any]) -> Any:
    """A score in a line of evaluations.jsonl, or of steps.jsonl, where the name may lack the prefix of the training data."""
    scores = line.get("scores") or {}
    return scores.get(loss, scores.get(name))


def _best_note(runs: list[Run], loss: str, datasets: Iterable[str]) -> str:
    best = {dataset: runs[0].best(f"{dataset}_loss_{loss}") for dataset in datasets if dataset != "train"}
    texts = [f"{dataset} {pair[1]:.4g} in epoch {pair[0]}" for dataset, pair in best.items() if pair]
    return f"best: {', '.join(texts)}" if texts and len(runs) == 1 else ""


def learning_rates(runs: list[Run]) -> Panel:
    """The learning rate of each step if steps were logged, otherwise of each epoch."""
    curves = []
    for number, run in enumerate(runs):
        name, color = ("learning rate", GREY) if len(runs) == 1 else (run.name, number)
        within = list(_step_curves(run, name, lambda line: line.get("learning_rate"), color, smooth=False))
        epochs = [epoch for epoch in run.epochs if finite(epoch.get("learning_rate")) is not None]
        by_epoch = Curve(name, positions(run, epochs), [finite(epoch["learning_rate"]) for epoch in epochs], color)
        curves += [replace(curve, run=number) for curve in within or ([by_epoch] if epochs else [])]
    return Panel("learning rate", curves, from_zero=True)


def speed_figures(runs: list[Run]) -> list[Figure]:
    """Sequences and frames per second, gradient norms, memory, and the shares of computing and of waiting for data."""
    shares = [_by_step(runs, "computing", "computing", per_epoch=lambda epoch: epoch.get("computing"))]
    shares.append(_by_step(runs, "waiting for data", "data_wait", place=1))
    per_second = _by_step(runs, "", "sequences_per_second", per_epoch=sequences_per_second)
    keys = dict.fromkeys(key for run in runs for line in run.steps for key in line.get("frames_per_second") or {})
    frames = [
        _by_step(runs, key, lambda line, key=key: (line.get("frames_per_second") or {}).get(key), place=place)  # type: ignore[misc]
        for place, key in enumerate(keys)
    ]
    figures = (
        ("speed", "Sequences per second", "of all ranks", per_second, "/s"),
        ("shares", "Share of the time", "of rank 0", sum(shares, []), "%"),
        ("frames", "Frames per second", "of all ranks", sum(frames, []), "/s"),
        ("gradient norm", "Gradient norm", "", _by_step(runs, "", "gradient_norm"), ""),
        ("memory", "Memory", "of rank 0", _by_step(runs, "", "memory"), "B"),
    )
    return [
        Figure(name, title, note, [Panel("", curves, unit, from_zero=True)])
        for name, title, note, curves, unit in figures
        if any(value is not None for curve in curves for value in curve.y)
    ]


def _by_step(
    runs: list[Run],
    name: str,
    value: str | Callable[[Mapping[str, Any]], Any],
    per_epoch: Callable[[Mapping[str, Any]], Any] | None = None,
    place: int = 0,
) -> list[Curve]:
    """A curve for each run: `value` of each line of steps.jsonl, or `per_epoch` of each epoch if no steps were recorded."""
    curves = []
    for number, run in enumerate(runs):
        label = f"{run.name} {name}".strip() if len(runs) > 1 else name or run.name
        color, dash = (number, DASHES[place % 3]) if len(runs) > 1 else (place, "solid")
        within = list(_step_curves(run, label, (lambda line: line.get(value)) if isinstance(value, str) else value, color, dash))
        if not within and per_epoch is not None:
            values = [finite(per_epoch(epoch)) for epoch in run.epochs]
            within = [Curve(label, middles(run, run.epochs), values, color, dash)]
        curves += [replace(curve, run=number, part=name or (run.name if len(runs) == 1 else "")) for curve in within]
    return curves


def sequences_per_second(epoch: Mapping[str, Any]) -> float | None:
    """Sequences that all ranks trained on per second of an epoch, without evaluation and saving; None if unknown."""
    number = finite(epoch.get("num_sequences"))
    seconds = finite(epoch.get("elapsed"))
    return number / seconds if number is not None and seconds else None


def time_figures(run: Run) -> list[Figure]:
    """Where the time of a run went: by epoch and, with several ranks, by rank, and which ranks were late."""
    epochs = [epoch for epoch in run.epochs if epoch.get("seconds")]
    if not epochs:
        return []
    names = activities([run])
    before = [float(epoch.get("seconds_before") or 0.0) for epoch in epochs]
    ranks = min(len(epoch["seconds"]) for epoch in epochs)
    by_epoch = _mean_seconds(names, [epoch["seconds"] for epoch in epochs])
    if any(before):
        by_epoch.append((BEFORE, len(names), before))
    mean = "mean over the ranks" if ranks > 1 else ""
    figures = [Figure("time", "Each epoch's time", mean, bars=Bars([epoch["epoch"] for epoch in epochs], by_epoch, "epoch"))]
    if ranks > 1:
        seconds = [[own_seconds(epoch["seconds"][rank]) for epoch in epochs] for rank in range(ranks)]
        usual = [median(column) for column in zip(*seconds, strict=True)]
        shown = list(range(ranks))
        if ranks > MOST_RANKS:
            shown = sorted(sorted(shown, key=lambda rank: -sum(seconds[rank]))[:MOST_RANKS])
        of_many = f"; the {len(shown)} slowest of {ranks} ranks" if len(shown) < ranks else ""
        rows = _mean_seconds(names, [[epoch["seconds"][rank] for epoch in epochs] for rank in shown])
        bars = Bars([f"rank {rank}" for rank in shown], rows, "", horizontal=True)
        figures.append(Figure("ranks", "Each rank's time", f"mean over the epochs{of_many}", bars=bars))
        late = [
            [value / middle - 1 if middle else None for value, middle in zip(seconds[rank], usual, strict=True)] for rank in shown
        ]
        rounded: list[Values] = [[round(value, 3) for value in seconds[rank]] for rank in shown]
        heat = Heat([epoch["epoch"] for epoch in epochs], shown, late, rounded)
        about = f"own work (computing and waiting for data) against the median rank{of_many}"
        figures.append(Figure("stragglers", "Slow ranks", about, heat=heat))
    padded = [epoch for epoch in run.epochs if epoch.get("padding")]
    keys = dict.fromkeys(key for epoch in padded for key in epoch["padding"])
    curves = [
        Curve(key, middles(run, padded), [finite(epoch["padding"].get(key)) for epoch in padded], number, part=key)
        for number, key in enumerate(keys)
    ]
    return figures + (
        [Figure("padding", "Padding", "share of the frames", [Panel("", curves, "%", from_zero=True)])] if curves else []
    )


def time_comparison(runs: list[Run]) -> list[Figure]:
    """The mean time of an epoch by activity, for several runs."""
    timed = [run for run in runs if any(epoch.get("seconds") for epoch in run.epochs)]
    ranks = [[rank for epoch in run.epochs for rank in epoch.get("seconds") or []] for run in timed]
    series = _mean_seconds(activities(runs), ranks)
    bars = Bars([run.name for run in timed], series, "", horizontal=True, of_runs=True)
    return [Figure("time of runs", "An epoch's time", "mean over ranks and epochs", bars=bars, wide=True)] if timed else []


def _mean_seconds(names: Sequence[str], groups: Sequence[Sequence[Mapping[str, float]]]) -> list[tuple[str, int, list[float]]]:
    """The series of bars: for each activity, the mean of its seconds in each group."""
    return [(name, _color(names, name), [_mean(rank.get(name, 0.0) for rank in group) for group in groups]) for name in names]


def activities(runs: Sequence[Run]) -> list[str]:
    """The activities with recorded seconds: computing first, as the base of every bar, and the rest last."""
    names = dict.fromkeys(name for run in runs for epoch in run.epochs for rank in epoch.get("seconds") or [] for name in rank)
    order = {name: number for number, name in enumerate([*ACTIVITIES, *(name for name in names if name not in ACTIVITIES)])}
    return sorted(names, key=lambda name: (name == "rest", order[name]))


def _color(names: Sequence[str], name: str) -> int:
    if name == "rest":
        return GREY
    return ACTIVITIES.index(name) if name in ACTIVITIES else len(ACTIVITIES) + list(names).index(name)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def split(name: str) -> tuple[str, str]:
    """A score's dataset and loss.

    >>> split("dev_loss_ce"), split("ce")
    (('dev', 'ce'), ('', 'ce'))
    """
    match = re.match(r"(.+?)_loss_(.+)", name)
    return (match[1], match[2]) if match else ("", name)


def finite(value: Any) -> float | None:
    """A number of a report; None if it is missing or not finite (scores.jsonl has strings such as 'nan').

    >>> finite(0.5), finite("nan"), finite(None)
    (0.5, None, None)
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def positions(run: Run, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """The ends of epochs on the x axes: in epochs, in steps of the whole training, and in seconds."""
    ends = _ends(run)
    return {
        "epoch": [epoch["epoch"] for epoch in epochs],
        "step": [ends[epoch["epoch"]][0] for epoch in epochs],
        "seconds": [round(ends[epoch["epoch"]][1], 3) for epoch in epochs],
    }


def middles(run: Run, epochs: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    """The middles of the training of epochs on the x axes, where their means are drawn."""
    ends = _ends(run)
    steps: Values = []
    seconds: Values = []
    for epoch in epochs:
        step, second = ends[epoch["epoch"]]
        steps.append(step - int(epoch.get("steps") or 0) / 2)
        whole = seconds_of(epoch)
        seconds.append(round(second - whole + min(whole, float(epoch.get("elapsed") or 0.0)) / 2, 3))
    return {"epoch": [epoch["epoch"] - 0.5 for epoch in epochs], "step": steps, "seconds": seconds}


def _ends(run: Run) -> dict[int, tuple[int, float]]:
    """By epoch, the steps done and the seconds passed at its end."""
    ends = {}
    steps = 0
    seconds = 0.0
    for epoch in run.epochs:
        steps = int(epoch.get("global_step") or steps + int(epoch.get("steps") or 0))
        seconds += seconds_of(epoch)
        ends[epoch["epoch"]] = (steps, seconds)
    return ends


def seconds_of(epoch: Mapping[str, Any]) -> float:
    """Rank 0's seconds of an epoch, including evaluation, saving, and the time before it was resumed."""
    if not epoch.get("seconds"):
        return float(epoch.get("elapsed") or 0.0)
    return sum(epoch["seconds"][0].values(), float(epoch.get("seconds_before") or 0.0))


def _step_curves(
    run: Run,
    name: str,
    value: Callable[[Mapping[str, Any]], Any],
    color: int,
    dash: str = "solid",
    *,
    smooth: bool = True,
    lines: Sequence[Mapping[str, Any]] | None = None,
) -> Iterable[Curve]:
    """The curve of a value within epochs: the values themselves, faintly, and smoothed; `lines`: None: those of steps.jsonl."""
    of_steps = run.steps if lines is None else lines
    points = [(line, value(line)) for line in of_steps if value(line) is not None]
    if not any(finite(number) is not None for _, number in points):
        return
    ends = [(0, (0, 0.0)), *_ends(run).items()]
    before = [epoch for epoch, _ in ends]
    places = []
    values = []
    missing: list[Mapping[str, float | str | None]] = []
    for line, number in points:
        steps, seconds = ends[bisect_left(before, line["epoch"]) - 1][1]
        passed = seconds + (finite(line.get("elapsed")) or 0.0)
        place = (line["epoch"] - 1 + float(line["progress"]), steps + int(line["step"]), passed)
        if (score := finite(number)) is not None:
            places.append(place)
            values.append(score)
        else:
            missing.append({**dict(zip(("epoch", "step", "seconds"), place, strict=True)), "text": str(number)})

    def curve(numbers: Sequence[float], label: str, look: str) -> Curve:
        drawn = decimate(numbers)
        at = [places[number] for number in drawn]
        x: dict[str, Values] = {
            "epoch": [round(epoch, 4) for epoch, _, _ in at],
            "step": [step for _, step, _ in at],
            "seconds": [round(seconds, 2) for _, _, seconds in at],
        }
        shown = missing[:MAX_MISSING] if look != "faint" else []
        return Curve(label, x, [float(f"{numbers[number]:.6g}") for number in drawn], color, dash, look, missing=shown)

    if smooth and len(values) >= MIN_TO_SMOOTH:
        yield curve(values, "", "faint")
        yield curve(moving_mean(values), name, "steps")
    else:
        yield curve(values, name, "steps" if len(values) > 1 else "line")


MAX_MISSING = 100
"""The most values of a curve within epochs that are marked as not finite."""

MIN_TO_SMOOTH = 20
"""A curve with at least this many points is smoothed."""


def thinned(figure: Figure, limit: int) -> Figure:
    """The figure with at most `limit` points on each curve within epochs, and without raw values behind smoothed ones."""

    def thin(curve: Curve) -> Curve:
        if curve.look == "line" or len(curve.y) <= limit:
            return curve
        drawn = decimate([0.0 if value is None else value for value in curve.y], limit)
        x = {name: [values[number] for number in drawn] for name, values in curve.x.items()}
        return replace(curve, x=x, y=[curve.y[number] for number in drawn])

    panels = [replace(panel, curves=[thin(curve) for curve in panel.curves if curve.look != "faint"]) for panel in figure.panels]
    return replace(figure, panels=panels)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Means over a window around every point: a fiftieth of the curve, but at least five points.

    >>> moving_mean([0.0, 0.0, 5.0, 0.0, 0.0, 10.0])
    [1.6666666666666667, 1.25, 1.0, 3.0, 3.75, 3.3333333333333335]
    """
    half = max(2, len(values) // 100)
    sums = numpy.concatenate([[0.0], numpy.cumsum(values)])
    first = numpy.maximum(numpy.arange(len(values)) - half, 0)
    last = numpy.minimum(numpy.arange(len(values)) + half + 1, len(values))
    means: list[float] = ((sums[last] - sums[first]) / (last - first)).tolist()
    return means


def decimate(values: Sequence[float], limit: int = MAX_POINTS) -> list[int]:
    """The indices of at most `limit` values: the ends, and the minimum and maximum of every interval, so that peaks stay visible.

    >>> decimate([1, 2, 3, 9, 3, 2, 1, 0, 1, 2], limit=4)
    [0, 3, 7, 9]
    """
    if len(values) <= limit:
        return list(range(len(values)))
    drawn = {0, len(values) - 1}
    array = numpy.asarray(values)
    for interval in numpy.array_split(numpy.arange(len(values)), limit // 2 - 1):
        segment = array[interval]
        drawn |= {int(interval[segment.argmin()]), int(interval[segment.argmax()])}
    return sorted(drawn)
