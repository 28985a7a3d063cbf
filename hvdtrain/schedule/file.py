"""The file of the key `learning_rate_file`: learning rate and scores of each epoch, in RETURNN's format.

    {
    1: EpochData(learningRate=0.01, error={
    'dev_loss_ce': 0.5030384659767151,
    }),
    }

It is the source of a Python dict. RETURNN evaluates it; here it is only parsed, and no code in it is run.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.errors import DataError
from hvdtrain.schedule.history import META, EpochRecord

NUMBERS = {"nan": float("nan"), "inf": float("inf")}


class Finished(Protocol):
    """The report of a finished epoch, as far as the file needs it."""

    @property
    def epoch(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def scores(self) -> Mapping[str, float]: ...


class LearningRateFile:
    """Writes the file after each epoch.

    Args:
        records: the finished epochs of the checkpoint. Later epochs in an existing file are from a run that was stopped before
            their checkpoint was written; they are replaced.
    """

    def __init__(self, path: Path, records: Iterable[EpochRecord]) -> None:
        self._path = path
        self._records = list(records)

    def epoch(self, report: Finished) -> None:
        """Add a finished epoch, and replace the file atomically."""
        earlier = [record for record in self._records if record.epoch < report.epoch]
        self._records = [*earlier, EpochRecord(report.epoch, report.learning_rate, dict(report.scores))]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_name(self._path.name + ".new_tmp")
        unfinished.write_text(as_text(self._records), encoding="utf-8")
        unfinished.replace(self._path)


def as_text(records: Iterable[EpochRecord]) -> str:
    """The contents of the file, with one score per line, in RETURNN's order."""
    lines = ["{"]
    for record in records:
        lines.append(f"{record.epoch}: EpochData(learningRate={float(record.learning_rate)!r}, error={{")
        for name, value in sorted(record.scores.items()):
            written = repr(value) if math.isfinite(value) else f"float('{value!r}')"
            lines.append(f"{name!r}: {written},")
        lines.append("}),")
    return "\n".join([*lines, "}"]) + "\n"


def read_learning_rate_file(path: Path) -> list[EpochRecord]:
    """Read the finished epochs of a file, oldest first: those with scores. Metadata (':meta:...') is skipped.

    Raises:
        DataError: the file cannot be read or has another format.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), mode="eval").body
        entries = {_number(key): _entry(value) for key, value in _items(tree)}
    except (OSError, SyntaxError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: expected a learning rate file, {{epoch: EpochData(learningRate=..., error={{...}})}}, got: "
            f"{error} (learning_rate_file)"
        ) from None
    return [
        EpochRecord(int(epoch), rate, scores) for epoch, (rate, scores) in sorted(entries.items()) if scores and rate is not None
    ]


def _items(node: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if not isinstance(node, ast.Dict):
        raise ValueError(f"a {type(node).__name__} instead of a dict in line {node.lineno}")
    return [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]


def _entry(node: ast.expr) -> tuple[float | None, dict[str, float]]:
    """Learning rate and scores from `EpochData(learningRate=..., error={...})`, or from a plain number as in old files."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "EpochData"):
        return float(_number(node)), {}
    given: dict[str | None, ast.expr] = dict(zip(("learningRate", "error"), node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in node.keywords}
    rate = given.get("learningRate")
    scores = {str(ast.literal_eval(key)): value for key, value in _items(given["error"])} if "error" in given else {}
    return (
        None if rate is None or (isinstance(rate, ast.Constant) and rate.value is None) else float(_number(rate)),
        {name: float(_number(value)) for name, value in scores.items() if not name.startswith(META)},
    )


def _number(node: ast.expr) -> Any:
    """Parse a number, which may be nan or inf, have a sign, or be written as `float('inf')` or numpy's `np.float32(0.01)`."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        [inside] = node.args
        if isinstance(node.func, ast.Name) and node.func.id == "float" and isinstance(inside, ast.Constant):
            return float(inside.value)  # type: ignore[arg-type]  # raises ValueError if it is not a number
        if isinstance(node.func, ast.Attribute):
            return _number(inside)
    if isinstance(node, ast.Name) and node.id in NUMBERS:
        return NUMBERS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    value = ast.literal_eval(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} instead of a number in line {node.lineno}")
    return value
