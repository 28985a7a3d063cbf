"""What training tells: log lines, and a line of JSON per epoch for scripts."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from hvdtrain.config.keys import Rule, key, not_negative
from hvdtrain.errors import ConfigError
from hvdtrain.scores import text
from hvdtrain.timer import clock_text

LOGGER = logging.getLogger("hvdtrain")


@dataclass(frozen=True, kw_only=True)
class ReportKeys:
    """What is told, and where."""

    log: str | list[str] | None = key(
        None, "log files; every rank writes one of its own (name.horovod-RANK-SIZE.ext); rank 0 prints to the screen in any case"
    )
    log_verbosity: int = key(
        5,
        "0: nothing; 1: scores; 3: also an epoch's time; 4: also learning rate, saving, start-up; 5: also steps",
        Rule("a number from 0 to 5", lambda value: 0 <= value <= 5),
    )
    log_interval: float = key(10.0, "seconds between two lines about steps within an epoch; 0: a line every step", not_negative)


@dataclass(frozen=True)
class EpochReport:
    """Everything that is known of a finished epoch.

    Attributes:
        computing: share of the epoch's wall time that went into training steps, collectives included; rank 0's.
        scores: by key, such as 'train_loss_ce' or 'dev_loss_wer' (errors are called losses here, as RETURNN calls them).
        padding: by data key, the share of the frames in the epoch's batches that was padding (where every rank goes through
            all data in an order of its own: in rank 0's batches).
        seconds: by rank, seconds under each name (data wait, compute, communication, parameter sync, evaluation, saving, rest).
    """

    epoch: int
    steps: int
    global_step: int
    elapsed: float
    computing: float
    learning_rate: float
    num_sequences: int
    scores: Mapping[str, float]
    padding: Mapping[str, float] = field(default_factory=dict)
    seconds: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """The line RETURNN's users look at."""
        return (
            f"train epoch {self.epoch}, finished after {self.steps} steps, {clock_text(self.elapsed)} elapsed "
            f"({self.computing:.1%} computing time)"
        )

    @property
    def padding_line(self) -> str:
        """How much of the epoch's batches was padding."""
        shares = ", ".join(f"{name} {share:.1%}" for name, share in self.padding.items())
        return f"train epoch {self.epoch}, padding: {shares}"


class Reporter(Protocol):
    """Somebody who wants to know about finished epochs."""

    def epoch(self, report: EpochReport) -> None: ...


class JsonLines:
    """Appends one line of JSON per epoch to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def epoch(self, report: EpochReport) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fields = asdict(report)
        fields["scores"] = {name: value if math.isfinite(value) else str(value) for name, value in report.scores.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields) + "\n")


# RETURNN's levels 1 to 5 in terms of the standard library's.
LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.INFO - 5, 5: logging.DEBUG}


def say(level: int, message: str) -> None:
    """Log a message that is shown from this `log_verbosity` on (1 to 5)."""
    LOGGER.log(LEVELS[level], message)


def open_log(keys: ReportKeys, rank: int, size: int) -> None:
    """Direct the log: rank 0 to the screen, every rank to its own file where `log` names one.

    Raises:
        ConfigError: a file cannot be written.
    """
    LOGGER.setLevel(LEVELS[keys.log_verbosity] if keys.log_verbosity else logging.CRITICAL)
    LOGGER.propagate = False
    for old in list(LOGGER.handlers):
        LOGGER.removeHandler(old)
        old.close()
    targets = [keys.log] if isinstance(keys.log, str) else keys.log or []
    # Without any handler, logging itself would print what is important, on every rank.
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout) if rank == 0 else logging.NullHandler()]
    for target in targets:
        if target != "stdout":
            path = rank_file(Path(target), rank, size)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handlers.append(logging.FileHandler(path, encoding="utf-8"))
            except OSError as error:
                raise ConfigError([f"log: expected a file that can be written, got {path}: {error.strerror}"]) from None
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(handler)


def rank_file(path: Path, rank: int, size: int) -> Path:
    """A rank's own file: `train.log` alone, `train.horovod-0-2.log` as rank 0 of 2."""
    return path if size == 1 else path.with_name(f"{path.stem}.horovod-{rank}-{size}{path.suffix}")


def score_lines(epoch: int, scores: Mapping[str, float], datasets: list[str], elapsed: float) -> list[str]:
    """Lines with the scores: one for training, one for all evaluations."""

    def of(dataset: str) -> str:
        start = f"{dataset}_loss_"
        return text({name.removeprefix(start): value for name, value in scores.items() if name.startswith(start)})

    lines = [f"epoch {epoch} score: {of('train')}, elapsed: {clock_text(elapsed)}"]
    evaluations = "; ".join(f"{dataset}: {of(dataset)}" for dataset in datasets)
    return lines + ([f"epoch {epoch} evaluation: {evaluations}"] if evaluations else [])
