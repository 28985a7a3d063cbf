"""The file of the key `learning_rate_file`: learning rate and scores of each epoch, in RETURNN's format.

    {
    1: EpochData(learningRate=0.01, error={
    ':meta:epoch_num_train_steps': 200,
    'dev_loss_ce': 0.5030384659767151,
    }),
    }

It is the source of a Python dict. RETURNN and job managers evaluate it; here it is only parsed, and no code in it is run.
Entries ':meta:...' are not scores, but metadata about how and where an epoch was trained, under RETURNN's names.
"""

from __future__ import annotations

import ast
import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.config.writable import writable
from hvdtrain.disk.atomic import UNFINISHED, write_atomically
from hvdtrain.errors import DataError
from hvdtrain.plugins.schedules.keys import RateFileKeys
from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.starts import Start
from hvdtrain.report.steps import Reporters
from hvdtrain.schedule.history import META, EpochRecord
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session
from hvdtrain.version import __version__

NO_META: Mapping[str, Any] = {}

NUMBERS = {"nan": float("nan"), "inf": float("inf")}


def epoch_meta(report: EpochReport) -> dict[str, Any]:
    """An epoch's metadata in the file, with RETURNN's names and units."""
    return {
        "effective_learning_rate": float(report.learning_rate),
        "epoch_num_train_steps": report.steps,
        "epoch_train_time_secs": round(report.elapsed),
        "global_train_step": report.global_step - report.steps,
        "global_train_step_end": report.global_step,
        "hostname": socket.gethostname(),
        "hvdtrain": __version__,
        "time": time.strftime("%Y-%m-%d-%H-%M-%S (UTC%z)"),
    }


class LearningRateFile:
    """Writes the file after each epoch.

    Args:
        records: the finished epochs of the checkpoint. Later epochs in an existing file are from a run that was stopped before
            their checkpoint was written; they are replaced. An existing file's metadata about finished epochs stays.

    Raises:
        ConfigError: the file is not writable.
    """

    def __init__(self, path: Path, records: Iterable[EpochRecord]) -> None:
        self._path = path
        self._records = list(records)
        self._meta = _read_meta(path)
        with writable("learning_rate_file", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            tried = path.with_name(f"{path.name}{UNFINISHED}")
            tried.touch()
            tried.unlink()

    def epoch(self, report: EpochReport) -> None:
        """Add a finished epoch, with the unscaled rate, from which the next epoch's is computed."""
        rate = report.learning_rate if report.epoch_learning_rate is None else report.epoch_learning_rate
        self.add(EpochRecord(report.epoch, rate, dict(report.scores)), epoch_meta(report))

    def add(self, record: EpochRecord, meta: Mapping[str, Any] = NO_META) -> None:
        """Add an epoch with its metadata, and replace the file atomically."""
        self._meta[record.epoch] = {META + name: value for name, value in meta.items()}
        self._records = [*(earlier for earlier in self._records if earlier.epoch < record.epoch), record]
        with writable("learning_rate_file", self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, as_text(self._records, self._meta))


def as_text(records: Iterable[EpochRecord], meta: Mapping[int, Mapping[str, Any]]) -> str:
    """The contents of the file, with one score per line, in RETURNN's order.

    Args:
        meta: by epoch, the entries that are not scores.
    """
    lines = ["{"]
    for record in records:
        lines.append(f"{record.epoch}: EpochData(learningRate={float(record.learning_rate)!r}, error={{")
        for name, value in sorted({**meta.get(record.epoch, {}), **record.scores}.items()):
            is_special = isinstance(value, float) and not math.isfinite(value)
            lines.append(f"{name!r}: " + (f"float('{value!r}')," if is_special else f"{value!r},"))
        lines.append("}),")
    return "\n".join([*lines, "}"]) + "\n"


def _read_meta(path: Path) -> dict[int, dict[str, Any]]:
    """By epoch, the metadata of an existing file. Ignores unreadable entries, as metadata is informational only."""
    meta: dict[int, dict[str, Any]] = {}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), mode="eval").body
        for key, node in _items(tree):
            entries = [keyword.value for keyword in node.keywords if keyword.arg == "error"] if isinstance(node, ast.Call) else []
            for name, value in _items(entries[0]) if entries else []:
                if str(ast.literal_eval(name)).startswith(META) and isinstance(value, (ast.Constant, ast.UnaryOp)):
                    meta.setdefault(int(_number(key)), {})[ast.literal_eval(name)] = ast.literal_eval(value)
    except (OSError, SyntaxError, TypeError, ValueError):
        pass
    return meta


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
    arguments: dict[str | None, ast.expr] = dict(zip(("learningRate", "error"), node.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords}
    rate = arguments.get("learningRate")
    scores = {str(ast.literal_eval(key)): value for key, value in _items(arguments["error"])} if "error" in arguments else {}
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


@contextmanager
def open_file(settings: Settings, session: Session, start: Start) -> Iterator[Reporters]:
    """Writes the file of a config, if it has one."""
    path = path_of(settings)
    records = session.progress.history
    yield Reporters() if path is None else Reporters([LearningRateFile(path, records)])


def path_of(settings: Settings) -> Path | None:
    """The file of a config, which `overfit_batches` leaves alone."""
    name = settings.of(RateFileKeys).learning_rate_file
    return None if name is None or settings.run.overfit_batches is not None else Path(name)


class FormerEpochs(CheckpointHooks):
    """The file has the scores of the epochs that a model was trained for elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self._path = path_of(settings)

    def history(self, epoch: int) -> list[EpochRecord]:
        return read_learning_rate_file(self._path) if self._path is not None and self._path.exists() else []
