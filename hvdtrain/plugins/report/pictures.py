"""The figures of a report as PNG files for slides and papers, drawn with matplotlib, which needs no browser."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.report.plots import Bars, Curve, Figure, Heat, Panel, Scatter

try:
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot
    from matplotlib.axes import Axes
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
except ImportError as error:
    raise ConfigError.of(
        "missing-package", f"hvdtrain report --pictures: expected the package matplotlib, got: {error} (pip install matplotlib)"
    ) from None

COLORS = "#0f6cbd #d8590b #0a8f66 #b0489b #b98500 #3aa5d6 #8a5a3c #6b5fc7 #c8324f #5d7d0e #007c8c #555".split()
"""The colors of page.css."""

GREY = "#98a2ad"

STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def write_pictures(folder: Path, figures: Iterable[Figure]) -> list[Path]:
    """Write every figure as a PNG file and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in figures:
        files.append(folder / (re.sub(r"[^\w.-]+", "-", figure.name) + ".png"))
        _draw(figure, files[-1])
    return files


def _draw(figure: Figure, file: Path) -> None:
    rows = max(1, len(figure.panels))
    size = (8.0, 3.8 + 1.2 * (rows > 1))
    heights = [3, 1][:rows]
    drawn, axes = pyplot.subplots(rows, figsize=size, sharex=True, squeeze=False, layout="constrained", height_ratios=heights)
    for panel, axis in zip(figure.panels, axes[:, 0], strict=False):
        _draw_panel(axis, panel)
    if figure.bars is not None:
        _draw_bars(axes[0, 0], figure.bars)
    if figure.heat is not None:
        _draw_heat(axes[0, 0], figure.heat)
    if figure.scatter is not None:
        _draw_scatter(axes[0, 0], figure.scatter)
    axes[0, 0].set_title(figure.title, loc="left", fontsize=11)
    if figure.panels:
        axes[-1, 0].set_xlabel("epoch")
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
    drawn.savefig(file, dpi=150)
    pyplot.close(drawn)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        _draw_curve(axes, curve)
    axes.grid(axis="y", alpha=0.3)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if panel.unit == "%":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.unit:
        axes.yaxis.set_major_formatter(EngFormatter(unit=panel.unit.removeprefix("/s")))
    axes.set_ylabel(panel.title, fontsize=9)
    if len({curve.name for curve in panel.curves if curve.name}) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_curve(axes: Axes, curve: Curve) -> None:
    values = [float("nan") if value is None else value for value in curve.y]
    epochs = [float("nan") if epoch is None else epoch for epoch in curve.x["epoch"]]
    color = _color(curve.color)
    axes.plot(
        epochs,
        values,
        STYLES[curve.dash],
        color=color,
        marker="." if curve.look == "line" else "",
        linewidth=0.6 if curve.look == "faint" else 1.5,
        alpha=0.35 if curve.look == "faint" else 1.0,
        label=curve.name or "_",
    )
    for place in curve.missing:
        at = [float(place["epoch"] or 0.0)]
        axes.plot(at, [1.0], "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False, label="_")
    if curve.best is not None:
        axes.plot(epochs[curve.best], values[curve.best], "*", color=color, markersize=11, label="_")


def _draw_bars(axes: Axes, bars: Bars) -> None:
    places = list(range(len(bars.labels)))
    below = [0.0] * len(places)
    for name, number, values in bars.series:
        base: dict[str, Any] = {"left" if bars.horizontal else "bottom": below}
        (axes.barh if bars.horizontal else axes.bar)(places, values, **base, color=_color(number), label=name)
        below = [low + value for low, value in zip(below, values, strict=True)]
    every = -(-len(places) // 20)
    labels = [str(label) for label in bars.labels[::every]]
    if bars.horizontal:
        axes.set_yticks(places[::every], labels)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
    else:
        axes.set_xticks(places[::every], labels)
        axes.set_xlabel(bars.axis)
        axes.set_ylabel("seconds", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_heat(axes: Axes, heat: Heat) -> None:
    cells = [[float("nan") if value is None else value for value in row] for row in heat.late]
    most = max([0.15, *(abs(value) for row in cells for value in row if value == value)])  # not NaN
    drawn = axes.imshow(cells, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
    every_epoch = -(-len(heat.epochs) // 20)
    every_rank = -(-len(heat.ranks) // 20)
    axes.set_xticks(range(0, len(heat.epochs), every_epoch), [str(epoch) for epoch in heat.epochs[::every_epoch]])
    axes.set_yticks(range(0, len(heat.ranks), every_rank), [str(rank) for rank in heat.ranks[::every_rank]])
    axes.set_xlabel("epoch")
    axes.set_ylabel("rank", fontsize=9)
    axes.figure.colorbar(drawn, ax=axes, format=PercentFormatter(1.0))


def _draw_scatter(axes: Axes, scatter: Scatter) -> None:
    """The first score over the first key."""
    key, values = next(iter(scatter.keys.items()))
    name, scores = next(iter(scatter.scores.items()))
    for number, (value, score) in enumerate(zip(values, scores, strict=True)):
        if score is not None:
            axes.plot([value], [score], "o", color=_color(number), label=scatter.names[number])
    axes.set_xlabel(key)
    axes.set_ylabel(name, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _color(number: int) -> str:
    return GREY if number < 0 else COLORS[number % len(COLORS)]
