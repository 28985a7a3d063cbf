"""The log: rank 0 to the screen, every rank to a file of its own where one is asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.keys import Rule, key, not_negative
from hvdtrain.errors import ConfigError

LOGGER = logging.getLogger("hvdtrain")


@dataclass(frozen=True, kw_only=True)
class LogKeys:
    """What is logged, and where."""

    log: str | list[str] | None = key(
        None, "log files; every rank writes one of its own (name.horovod-RANK-SIZE.ext); rank 0 prints to the screen in any case"
    )
    log_verbosity: int = key(
        5,
        "0: nothing; 1: scores; 3: also an epoch's time; 4: also learning rate, saving, start-up; 5: also steps",
        Rule("a number from 0 to 5", lambda value: 0 <= value <= 5),
    )
    log_interval: float = key(10.0, "seconds between two lines about steps within an epoch; 0: a line every step", not_negative)


# RETURNN's levels 1 to 5 in terms of the standard library's.
LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.INFO - 5, 5: logging.DEBUG}


def say(level: int, message: str) -> None:
    """Log a message that is shown from this `log_verbosity` on (1 to 5)."""
    LOGGER.log(LEVELS[level], message)


def open_log(keys: LogKeys, rank: int, size: int) -> None:
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
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)] if rank == 0 else [logging.NullHandler()]
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


@contextmanager
def only_warnings() -> Iterator[None]:
    """Let through what is of level 2, and nothing else."""

    def is_warning(record: logging.LogRecord) -> bool:
        return record.levelno == LEVELS[2]

    LOGGER.addFilter(is_warning)
    try:
        yield
    finally:
        LOGGER.removeFilter(is_warning)


def rank_file(path: Path, rank: int, size: int) -> Path:
    """A rank's own file: `train.log` alone, `train.horovod-0-2.log` as rank 0 of 2."""
    return path if size == 1 else path.with_name(f"{path.stem}.horovod-{rank}-{size}{path.suffix}")
