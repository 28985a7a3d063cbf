"""The log: rank 0 to the screen, every rank to a file of its own where one is asked for."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative
from hvdtrain.errors import ConfigError

LOGGER = logging.getLogger("hvdtrain")

SCREEN = "stdout"

NOT_SAID = 3
"""The verbosity of a target for which a list has none, as RETURNN has it."""


def _is_verbosity(value: int | list[int]) -> bool:
    return all(0 <= level <= 5 for level in (value if isinstance(value, list) else [value]))


@dataclass(frozen=True, kw_only=True)
class LogKeys(Section):
    """What is logged, and where."""

    log: str | list[str] | None = key(
        None,
        "log files; every rank writes one of its own (name.horovod-RANK-SIZE.ext); '|command' hands rank 0's lines to a shell "
        "command; rank 0 prints to the screen in any case ('stdout')",
    )
    log_verbosity: int | list[int] = key(
        5,
        "0: nothing; 1: scores; 2: also warnings; 3: also times, and on a terminal a bar; 4: also learning rate, saving "
        "and start-up; 5: also lines about steps; or a list with a number for each of `log`",
        Rule("a number from 0 to 5, or a list of them", _is_verbosity),
    )
    log_interval: float = key(
        10.0,
        "seconds between two lines about steps, or two looks at the losses for the bar; 0: every step",
        not_negative,
    )

    log_batch_size: bool = key(
        False, "tell in lines about steps how many sequences rank 0's batch has, and the longest one's frames"
    )
    torch_log_memory_usage: bool = key(False, "tell in lines about steps the most memory that rank 0's GPU had to give so far")

    @property
    def targets(self) -> dict[str, int]:
        """By name, the targets with their verbosity, the screen among them."""
        names = [self.log] if isinstance(self.log, str) else list(self.log or [])
        if SCREEN not in names:
            names.append(SCREEN)
        if isinstance(self.log_verbosity, int):
            return dict.fromkeys(names, self.log_verbosity)
        missing = [NOT_SAID] * (len(names) - len(self.log_verbosity))
        return dict(zip(names, [*self.log_verbosity, *missing], strict=False))

    def problems(self, others: Sections = ALONE) -> list[str]:
        if isinstance(self.log_verbosity, list) and len(self.log_verbosity) > len(self.targets):
            return [
                f"log_verbosity: expected a number for each of {', '.join(self.targets)} at most, got {len(self.log_verbosity)}"
            ]
        return []


# RETURNN's levels 1 to 5 in terms of the standard library's.
LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.INFO - 5, 5: logging.DEBUG}


def say(level: int, message: str) -> None:
    """Log a message that is shown from this `log_verbosity` on (1 to 5)."""
    LOGGER.log(LEVELS[level], message)


def open_log(keys: LogKeys, rank: int, size: int) -> None:
    """Direct the log: rank 0 to the screen and to commands, every rank to its own file where `log` names one.

    Raises:
        ConfigError: a file cannot be written.
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
                raise ConfigError([f"log: expected a file that can be written, got {path}: {error.strerror}"]) from None
        handler.setLevel(LEVELS[verbosity])
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(handler)


class Screen(logging.Handler):
    """Prints to whatever stdout is at the moment: a bar puts something in between."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a terminal that was closed
            sys.stdout.write(f"{self.format(record)}\n")
            sys.stdout.flush()


class Command(logging.Handler):
    """Hands lines on to a shell command. One that has ended gets no more, which is told once."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        # A session of its own: Ctrl-C ends the training in good order, and the command gets its last lines.
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
            say(2, f"log: '|{self._command}' has ended and gets no more lines")

    def close(self) -> None:
        """End the command's input, and give it some seconds to end."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        super().close()


@contextmanager
def silence() -> Iterator[None]:
    """Nothing is logged meanwhile."""

    def never(record: logging.LogRecord) -> bool:
        return False

    LOGGER.addFilter(never)
    try:
        yield
    finally:
        LOGGER.removeFilter(never)


def rank_file(path: Path, rank: int, size: int) -> Path:
    """A rank's own file: `train.log` alone, `train.horovod-0-2.log` as rank 0 of 2."""
    return path if size == 1 else path.with_name(f"{path.stem}.horovod-{rank}-{size}{path.suffix}")
