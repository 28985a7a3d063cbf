"""The log: rank 0 writes to stdout and to commands, and every rank writes its own file if `log` names one."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.errors import ConfigError

LOGGER = logging.getLogger("hvdtrain")

SCREEN = "stdout"

DEFAULT_VERBOSITY = 3
"""The verbosity of a target beyond the end of the list `log_verbosity`, as in RETURNN."""


def _is_verbosity(value: int | list[int]) -> bool:
    return all(0 <= level <= 5 for level in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True, kw_only=True)
class LogKeys(Section):
    """What is logged, and where to."""

    log: str | list[str] | None = key(
        None,
        "log files; every rank writes its own (name.horovod-RANK-SIZE.ext); '|command' pipes rank 0's lines to a shell "
        "command; rank 0 always prints to stdout, too ('stdout')",
    )
    log_verbosity: int | list[int] = key(
        5,
        "0: nothing; 1: scores; 2: also warnings; 3: also times, and a progress bar on a terminal; 4: also learning rate, saving "
        "and start-up; 5: also lines about steps; or a list with a number for each of `log`",
        Rule("a number from 0 to 5, or a list of them", _is_verbosity),
    )
    log_interval: float = key(
        10.0,
        "seconds between two lines about steps, two updates of the losses in the progress bar, and two records of steps in "
        "steps.jsonl and trackers; 0: every step",
        not_negative,
    )
    log_interval_steps: int | None = key(
        None, "the same after every N steps of an epoch or an evaluation, instead of after log_interval seconds", positive
    )
    log_batch_size: bool = key(
        False, "log with the steps the number of sequences in rank 0's batch and the length of the longest one in frames"
    )
    torch_log_memory_usage: bool = key(False, "log with the steps the peak memory usage of rank 0's GPU so far")

    @property
    def targets(self) -> dict[str, int]:
        """The verbosity of each target by its name, including stdout."""
        names = [self.log] if isinstance(self.log, str) else list(self.log or [])
        if SCREEN not in names:
            names.append(SCREEN)
        if isinstance(self.log_verbosity, int):
            return dict.fromkeys(names, self.log_verbosity)
        missing = [DEFAULT_VERBOSITY] * (len(names) - len(self.log_verbosity))
        return dict(zip(names, [*self.log_verbosity, *missing], strict=False))

    def problems(self, others: Sections = ALONE) -> list[str]:
        if isinstance(self.log_verbosity, list) and len(self.log_verbosity) > len(self.targets):
            return [
                f"log_verbosity: expected at most one number for each of {', '.join(self.targets)}, got {len(self.log_verbosity)}"
            ]
        return []


# The levels of `logging` for RETURNN's verbosities 0 to 5.
LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.INFO - 5, 5: logging.DEBUG}


def say(level: int, message: str) -> None:
    """Log a message that is shown if `log_verbosity` is at least `level` (1 to 5)."""
    LOGGER.log(LEVELS[level], message)


def open_log(keys: LogKeys, rank: int, size: int) -> None:
    """Open the log's targets: stdout and commands on rank 0, and files on every rank.

    Raises:
        ConfigError: a file is not writable.
    """
    LOGGER.propagate = False
    for old in list(LOGGER.handlers):
        LOGGER.removeHandler(old)
        old.close()
    LOGGER.addHandler(logging.NullHandler())
    LOGGER.setLevel(LEVELS[max(keys.targets.values())])
    for target, verbosity in keys.targets.items():
        handler: logging.Handler
        if target.startswith("|") or target == SCREEN:
            if rank:
                continue
            handler = Screen() if target == SCREEN else Command(target[1:])
        else:
            path = rank_file(Path(target.replace("$date", time.strftime("%Y-%m-%d-%H-%M-%S"))), rank, size)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                handler = logging.FileHandler(path, encoding="utf-8")
            except OSError as error:
                raise ConfigError([f"log: expected a writable file, got {path}: {error.strerror}"]) from None
        handler.setLevel(LEVELS[verbosity])
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(handler)


class Screen(logging.Handler):
    """Writes to the current `sys.stdout`, which the progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the terminal was closed
            sys.stdout.write(f"{self.format(record)}\n")
            sys.stdout.flush()


class Command(logging.Handler):
    """Pipes lines to a shell command. Once the command has ended, it warns and drops all further lines."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        # In a session of its own, so that the command survives Ctrl-C and gets the last lines of the training.
        self._process = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, start_new_session=True)
        self._has_ended = False

    def emit(self, record: logging.LogRecord) -> None:
        if self._has_ended or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(f"{self.format(record)}\n".encode())
            self._process.stdin.flush()
        except OSError:
            self._has_ended = True
            say(2, f"log: '|{self._command}' has ended; it gets no more lines")

    def close(self) -> None:
        """Close the command's input and wait up to 10 seconds for it to end."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        super().close()


@contextmanager
def silence() -> Iterator[None]:
    """Drop all messages within the `with` block."""

    def drop(record: logging.LogRecord) -> bool:
        return False

    LOGGER.addFilter(drop)
    try:
        yield
    finally:
        LOGGER.removeFilter(drop)


def rank_file(path: Path, rank: int, size: int) -> Path:
    """The path of a rank's own file: `train.log` for a single process, `train.horovod-0-2.log` for rank 0 of 2."""
    return path if size == 1 else path.with_name(f"{path.stem}.horovod-{rank}-{size}{path.suffix}")
