"""summary.json and its table: the model layer by layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hvdtrain.learner.base import Layer

SUMMARY = "summary.json"

OutputShapes = Mapping[str, list[tuple[int, ...]]]
"""By the name of a layer, the shapes of the tensors that it returned for a batch, the first call's."""


def as_json(layers: Iterable[Layer], shapes: OutputShapes) -> dict[str, Any]:
    """What summary.json says of a model.

    Returns:
        `num_parameters`, `num_trainable`; `layers`, the model itself first, each with `name` ('' for the model), `type`,
        `parameters` (its own: a list of `name`, `shape`, `trainable`), `num_parameters` and `num_trainable` (its own and those of
        the layers inside it), and `output`, a list of shapes, or None where none was recorded.
    """
    rows = [_row(layer, shapes) for layer in layers]
    totals = [(row["name"], *_own_counts(row)) for row in rows]
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


def _own_counts(row: Mapping[str, Any]) -> tuple[int, int]:
    """A layer's own parameters: of all, and of those that are trained."""
    counts = [(prod(one["shape"]), one["trainable"]) for one in row["parameters"]]
    return sum(count for count, _ in counts), sum(count for count, trained in counts if trained)


def table(summary: Mapping[str, Any]) -> list[str]:
    """The lines of a table with a row for each layer.

    >>> layers = [Layer("", "Model", {}, frozenset()), Layer("last", "Linear", {"weight": (5, 8)}, frozenset())]
    >>> print("\\n".join(table(as_json(layers, {"last": [(3, 5)]}))))
    layer  type    output  parameters  trained
    model  Model   -               40       no
    last   Linear  3x5             40       no
    in all: 40 parameters, 0 of them are trained
    """
    lines = [("layer", "type", "output", "parameters", "trained")]
    for row in summary["layers"]:
        counts = row["num_parameters"], row["num_trainable"]
        trained = "-" if not counts[0] else "yes" if counts[0] == counts[1] else "no" if not counts[1] else f"{counts[1]:,}"
        lines.append((row["name"] or "model", row["type"], _shapes_text(row["output"]), f"{counts[0]:,}", trained))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=False)), *_right(line[3:], widths[3:])])
        for line in lines
    ]
    return [*texts, f"in all: {summary['num_parameters']:,} parameters, {summary['num_trainable']:,} of them are trained"]


def _right(cells: Iterable[str], widths: Iterable[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]


def _shapes_text(shapes: list[list[int]] | None) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes or []) or "-"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, whole or not at all. Raises: OSError."""
    path = folder / SUMMARY
    unfinished = path.with_name(SUMMARY + ".unfinished")
    unfinished.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
