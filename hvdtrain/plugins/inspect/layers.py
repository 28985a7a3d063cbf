"""The model layer by layer, for summary.json and the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from hvdtrain.disk.atomic import write_atomically
from hvdtrain.learner.base import Layer
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.runtime import log
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session

OutputShapes = Mapping[str, list[tuple[int, ...]]]
"""By layer name, the shapes of the tensors that the layer's first call returned for a batch."""


@contextmanager
def write_summary(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """When a training begins, write summary.json, and log the layers directly below the model."""
    summary = as_json(session.learner.layers(), {})
    write_atomically(settings.records / "summary.json", json.dumps(summary, indent=1) + "\n")
    for line in layer_rows(layer for layer in summary["layers"] if layer["name"] and "." not in layer["name"]):
        log.debug(line)
    if summary["num_trainable"] != summary["num_parameters"]:
        log.debug(f"{summary['num_trainable']:,} of the parameters are trained")
    yield Reporters()


def as_json(layers: Iterable[Layer], shapes: OutputShapes) -> dict[str, Any]:
    """The content of summary.json for a model.

    Returns:
        `num_parameters`, `num_trainable`, and `layers`, the model itself first, each with `name` ('' for the model), `type`,
        `parameters` (without those of inner layers: a list of `name`, `shape`, `trainable`), `num_parameters` and
        `num_trainable` (with those of inner layers), and `output`, a list of shapes, or None if none was recorded.
    """
    rows = [_row(layer, shapes) for layer in layers]
    totals = [(row["name"], *_counts_without_inner(row)) for row in rows]
    for row in rows:
        start = f"{row['name']}." if row["name"] else ""
        inside = [total for total in totals if total[0].startswith(start) or total[0] == row["name"]]
        row["num_parameters"] = sum(total[1] for total in inside)
        row["num_trainable"] = sum(total[2] for total in inside)
    return {
        "num_parameters": sum(total[1] for total in totals),
        "num_trainable": sum(total[2] for total in totals),
        "layers": rows,
    }


def _row(layer: Layer, shapes: OutputShapes) -> dict[str, Any]:
    parameters = [
        {"name": name, "shape": list(shape), "trainable": name in layer.trainable} for name, shape in layer.parameters.items()
    ]
    output = shapes.get(layer.name)
    return {
        "name": layer.name,
        "type": layer.type,
        "parameters": parameters,
        "num_parameters": 0,
        "num_trainable": 0,
        "output": None if output is None else [list(shape) for shape in output],
    }


def _counts_without_inner(row: Mapping[str, Any]) -> tuple[int, int]:
    """The sizes of a layer's parameters, without those of inner layers: of all, and of the trained ones."""
    counts = [(prod(parameter["shape"]), parameter["trainable"]) for parameter in row["parameters"]]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def table(summary: Mapping[str, Any]) -> list[str]:
    """The lines of a table with a row per layer, and of one with the sums.

    >>> layers = [Layer("", "Model", {}, frozenset()), Layer("last", "Linear", {"weight": (5, 8)}, frozenset())]
    >>> print("\\n".join(table(as_json(layers, {"last": [(3, 5)]}))))
    layer  type    output  parameters  trained
    model  Model   -               40       no
    last   Linear  3x5             40       no
    in all: 40 parameters, 0 of them are trained
    """
    rows = layer_rows(summary["layers"])
    return [*rows, f"in all: {summary['num_parameters']:,} parameters, {summary['num_trainable']:,} of them are trained"]


def layer_rows(layers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a table with a row for each of these layers of a summary."""
    lines = [("layer", "type", "output", "parameters", "trained")]
    for row in layers:
        counts = row["num_parameters"], row["num_trainable"]
        trained = "-" if not counts[0] else "yes" if counts[0] == counts[1] else "no" if not counts[1] else f"{counts[1]:,}"
        lines.append((row["name"] or "model", row["type"], _shapes_text(row["output"]), f"{counts[0]:,}", trained))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([*map(str.ljust, line[:3], widths), *map(str.rjust, line[3:], widths[3:])])  # numbers at the right
        for line in lines
    ]


def _shapes_text(shapes: list[list[int]] | None) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes or []) or "-"
