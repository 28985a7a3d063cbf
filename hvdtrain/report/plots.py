"""The figures of a report, drawn with matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402  # after the backend, which needs no display, is set
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator, PercentFormatter  # noqa: E402

from hvdtrain.report.runs import Run  # noqa: E402

COLORS = ["#1f6f8b", "#d1495b", "#edae49", "#66a182", "#8d5b9f", "#7a6c5d", "#2e4057"]
"""Colors of runs and of activities, chosen to be distinguishable for color-blind readers."""

STYLES = ["-", "--", ":", "-."]
"""Line styles of the datasets in a figure of scores."""

WIDTH, HEIGHT = 6.4, 3.6
"""Size of a figure in inches."""


def score_figures(runs: list[Run]) -> dict[str, Figure]:
    """One figure per loss or error, with a curve for the training data and one for each evaluated dataset."""
    names = sorted({name for run in runs for epoch in run.epochs for name in epoch["scores"]})
    figures = {}
    for loss in dict.fromkeys(_split(name)[1] for name in names):
        # Training first, then the others in alphabetical order.
        datasets = sorted((_split(name)[0] for name in names if _split(name)[1] == loss), key=lambda one: (one != "train", one))
        figure, axes = _figure(loss)
        for number, run in enumerate(runs):
            for place, dataset in enumerate(datasets):
                label = dataset if len(runs) == 1 else f"{run.name}, {dataset}"
                color = COLORS[(place if len(runs) == 1 else number) % len(COLORS)]
                axes.plot(
                    *run.scores(f"{dataset}_loss_{loss}"), STYLES[place % len(STYLES)], color=color, marker=".", label=label
                )
        _finish(axes, curves=len(runs) * len(datasets))
        figures[loss] = figure
    return figures


def learning_rate_figure(runs: list[Run]) -> Figure:
    """The learning rate of each epoch."""
    figure = _curve_by_epoch(runs, "learning rate", lambda epoch: epoch["learning_rate"])
    figure.axes[0].set_ylim(bottom=0)  # otherwise a constant rate gets axis labels of six digits
    return figure


def computing_figure(runs: list[Run]) -> Figure:
    """The share of each epoch's time spent in training steps."""
    figure = _curve_by_epoch(runs, "computing time", lambda epoch: epoch["computing"])
    figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    lowest = min(epoch["computing"] for run in runs for epoch in run.epochs)
    figure.axes[0].set_ylim(min(0.9, 0.95 * lowest), 1.0)  # so that 99.7 % and 99.9 % look alike
    return figure


def time_figure(run: Run) -> Figure:
    """The time of each epoch by activity, averaged over the ranks."""
    names = time_names(run)
    figure, axes = _figure("seconds of an epoch, mean over the ranks")
    epochs = [epoch["epoch"] for epoch in run.epochs]
    below = [0.0] * len(epochs)
    for name in names:
        values = [_mean([rank.get(name, 0.0) for rank in epoch["seconds"]]) for epoch in run.epochs]
        axes.bar(epochs, values, bottom=below, color=_color(names, name), label=name, width=0.8)
        below = [low + value for low, value in zip(below, values, strict=True)]
    _finish(axes, curves=len(names))
    return figure


def rank_figure(run: Run) -> Figure:
    """The time of each rank by activity, averaged over the epochs."""
    names = time_names(run)
    ranks = range(min(len(epoch["seconds"]) for epoch in run.epochs))
    figure, axes = _figure("seconds of an epoch by rank, mean over the epochs", height=1.6 + 0.4 * len(ranks))
    left = [0.0] * len(ranks)
    for name in names:
        values = [_mean([epoch["seconds"][rank].get(name, 0.0) for epoch in run.epochs]) for rank in ranks]
        axes.barh([str(rank) for rank in ranks], values, left=left, color=_color(names, name), label=name)
        left = [low + value for low, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_ylabel("rank")
    axes.grid(axis="x", alpha=0.3)
    _legend(axes, len(names))
    return figure


def padding_figure(run: Run) -> Figure:
    """The share of padding by data key."""
    figure, axes = _figure("padding")
    epochs = [epoch["epoch"] for epoch in run.epochs]
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch["padding"]))
    for number, name in enumerate(names):
        values = [epoch["padding"].get(name, 0.0) for epoch in run.epochs]
        axes.plot(epochs, values, color=COLORS[number % len(COLORS)], marker=".", label=name)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)
    _finish(axes, curves=len(names))
    return figure


def time_names(run: Run) -> list[str]:
    """The activities with recorded seconds: computing first, as the base of every bar, and the rest last."""
    names = dict.fromkeys(name for epoch in run.epochs for rank in epoch["seconds"] for name in rank)
    return sorted(names, key=lambda name: (name != "compute", name == "rest", list(names).index(name)))


def close(figures: list[Figure]) -> None:
    """Close the figures to free their memory."""
    for figure in figures:
        pyplot.close(figure)


def _curve_by_epoch(runs: list[Run], title: str, value: Callable[[Any], float]) -> Figure:
    """A figure with one curve per run: `value` of every epoch's report."""
    figure, axes = _figure(title)
    for number, run in enumerate(runs):
        epochs = [epoch["epoch"] for epoch in run.epochs]
        axes.plot(epochs, [value(epoch) for epoch in run.epochs], color=COLORS[number % len(COLORS)], marker=".", label=run.name)
    _finish(axes, curves=len(runs) if len(runs) > 1 else 0)
    return figure


def _figure(title: str, height: float = HEIGHT) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(WIDTH, height), layout="constrained")
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _finish(axes: Axes, curves: int) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    if curves:
        _legend(axes, curves)


def _legend(axes: Axes, entries: int) -> None:
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), ncols=1 + entries // 12)


def _color(names: list[str], name: str) -> str:
    return COLORS[names.index(name) % len(COLORS)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _split(name: str) -> tuple[str, str]:
    """A score's dataset and loss: ('dev', 'ce') for 'dev_loss_ce'."""
    match = re.match(r"(.+?)_loss_(.+)", name)
    return (match[1], match[2]) if match else ("", name)
