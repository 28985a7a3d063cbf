"""The log: rank 0 writes to stdout and to commands, and every rank writes its own file if `log` names one."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.config.writable import writable
from hvdtrain.errors import Problem, problem
from hvdtrain.runtime.process import OWN, Process
from hvdtrain.runtime.terminal import Window, terminal_of


class _Logger(logging.Logger):
    """A logger that cannot be disabled: `logging.config.dictConfig` in a config would do that with all that it does not name, and
    `logging.disable` with all there are."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  # its name in `logging`
        return level >= self.getEffectiveLevel()

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass


LOGGER = logging.getLogger("hvdtrain")
LOGGER.__class__ = _Logger

SCREEN = "stdout"

DEFAULT_VERBOSITY = 3
"""The verbosity of a target beyond the end of the list `log_verbosity`."""


BETWEEN = " | "
"""Separates the parts of a row. A terminal that is too narrow for the row shows them on several lines."""

GREEN, YELLOW, PLAIN = "\x1b[1;32m", "\x1b[33m", "\x1b[0m"
"""The escape codes of a terminal's colors."""


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
        3,
        "0: nothing; 1: scores; 2: also warnings; 3: also times, and a progress bar on a terminal; 4: also learning rate, saving "
        "and start-up; 5: also lines about steps, and those about epochs for programs; or a list with a number for each of `log`",
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
    log_color: Literal["auto", "always", "never"] = key(
        "auto",
        "colors of warnings and of the best epoch on stdout; auto: on a terminal, unless the environment has NO_COLOR; option "
        "--color",
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

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        if isinstance(self.log_verbosity, list) and len(self.log_verbosity) > len(self.targets):
            targets = ", ".join(self.targets)
            return problem(
                "out-of-range",
                f"log_verbosity: expected at most one number for each of {targets}, got {len(self.log_verbosity)}",
            )
        return []


NO_ENVIRONMENT: Mapping[str, str] = {}

# The levels of `logging` for the verbosities 0 to 5.
LEVELS = {0: logging.CRITICAL, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.INFO - 5, 5: logging.DEBUG}


def write(level: int, message: str) -> None:
    """Log a message that is shown if `log_verbosity` is at least `level` (1 to 5)."""
    LOGGER.log(LEVELS[level], message)


def row(level: int, message: str, indent: int = 4, good: str = "") -> None:
    """Log a line of several parts, separated by `BETWEEN`: one line in a file, as many as needed on a terminal.

    Args:
        indent: the columns before the second line and those after it.
        good: the words in it that are green where there are colors.
    """
    LOGGER.log(LEVELS[level], message, extra={"indent": indent, "good": good})


def result(message: str) -> None:
    """Log scores and other results of a training: level 1."""
    write(1, message)


def warning(message: str) -> None:
    """Log what may be a mistake: level 2."""
    write(2, message)


def info(message: str) -> None:
    """Log times and progress: level 3."""
    write(3, message)


def detail(message: str) -> None:
    """Log learning rates, saving and start-up: level 4."""
    write(4, message)


def debug(message: str) -> None:
    """Log steps: level 5."""
    write(5, message)


def open_log(
    keys: LogKeys, rank: int, size: int, process: Process = OWN, environment: Mapping[str, str] = NO_ENVIRONMENT
) -> None:
    """Open the log's targets: stdout, or the program's logging, and commands on rank 0, and files on every rank.

    Args:
        environment: may have NO_COLOR, and the kind of the terminal, TERM.

    Raises:
        ConfigError: a file is not writable.
    """
    program = None if process.log_handler is None else process.log_handler()
    LOGGER.propagate = False
    for old in list(LOGGER.handlers):
        LOGGER.removeHandler(old)
        if process.prints_log:
            old.close()
    LOGGER.addHandler(logging.NullHandler())
    LOGGER.setLevel(LEVELS[max(keys.targets.values())])
    for target, verbosity in keys.targets.items():
        handler: logging.Handler
        if target.startswith("|") or target == SCREEN:
            if rank:
                continue
            handler = Command(target[1:]) if target != SCREEN else open_screen(keys, environment) if program is None else program
        else:
            path = rank_file(Path(target.replace("$date", time.strftime("%Y-%m-%d-%H-%M-%S"))), rank, size)
            with writable("log", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                handler = LogFile(path, encoding="utf-8")
        handler.setLevel(LEVELS[verbosity])
        handler.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(handler)


class LogFile(logging.FileHandler):
    """A file of the log. If it cannot be written, as on a full disk, the other targets get one line about it."""

    _failure: str | None = None
    _is_told = False

    def handle(self, record: logging.LogRecord) -> bool:
        handled = super().handle(record)
        # Without this file's lock: a thread that holds another's, which cannot be written either, would wait for this one.
        if self._failure is not None and not self._is_told:
            self._is_told = True
            warning(f"log: {self.baseFilename} cannot be written: {self._failure}")
        return handled

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called while the error is handled."""
        self._failure = str(sys.exc_info()[1])


class Screen(logging.Handler):
    """Writes to the current `sys.stdout`, which the progress bar replaces while it is shown.

    Args:
        window: that of the terminal; rows are no wider. None: no terminal.
        has_colors: whether warnings and what is good have colors.
    """

    def __init__(self, window: Window | None = None, has_colors: bool = False) -> None:
        super().__init__()
        self._window = window
        self._has_colors = has_colors

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n"
        with suppress(OSError, ValueError, AttributeError):  # the terminal or the stream was closed, or a program took it away
            try:
                sys.stdout.write(line)
            except UnicodeEncodeError as error:
                sys.stdout.write(line.encode(error.encoding, "backslashreplace").decode(error.encoding))
            sys.stdout.flush()

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        indent = getattr(record, "indent", None)
        good = getattr(record, "good", "")
        if self._window is not None and indent is not None:
            text = "\n".join(wrap(text, self._window.columns, indent))
        if self._has_colors and record.levelno == LEVELS[2]:
            return f"{YELLOW}{text}{PLAIN}"
        return text.replace(good, f"{GREEN}{good}{PLAIN}") if self._has_colors and good else text


def open_screen(keys: LogKeys, environment: Mapping[str, str]) -> Screen:
    """The handler for stdout."""
    descriptor = terminal_of(sys.stdout)
    suits_colors = descriptor is not None and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
    has_colors = keys.log_color == "always" or (keys.log_color == "auto" and suits_colors)
    return Screen(None if descriptor is None else Window(descriptor), has_colors)


ENDS_OF_LINES = ((r" \| ", BETWEEN), ("  ", "  "), ("(?<=,) ", " "))
"""Where a row may be cut, coarse to fine: a pattern, and what stands there where the row goes on."""


def wrap(row: str, width: int, indent: int, ends: Sequence[tuple[str, str]] = ENDS_OF_LINES) -> list[str]:
    """The lines of a row in a terminal. Only a part that is itself too long is cut, at double spaces, and then after commas.

    >>> for line in wrap("epoch 1  train ce 2.31 | dev ce 2.40  fer 0.51 | eval ce 2.38  fer 0.50", 48, 9):
    ...     print(line)
    epoch 1  train ce 2.31 | dev ce 2.40  fer 0.51
             eval ce 2.38  fer 0.50
    >>> for line in wrap("goodput: 41.7% of 0:00:44; lost: start 3.7 s, restarts 20.8 s, the rest 0.9 s", 48, 4):
    ...     print(line)
    goodput: 41.7% of 0:00:44; lost: start 3.7 s,
        restarts 20.8 s, the rest 0.9 s
    """
    [(pattern, separator), *finer] = ends
    start = len(row) - len(row.lstrip())
    lines: list[str] = []
    for words in re.split(pattern, row[start:]):
        if lines and len(lines[-1]) + len(separator) + len(words.rstrip()) <= width:
            lines[-1] += separator + words
            continue
        line = " " * (indent if lines else start) + words
        lines += wrap(line, width, indent, finer) if finer and len(line.rstrip()) > width else [line]
    return [line.rstrip() for line in lines]


class Command(logging.Handler):
    """Pipes lines to a shell command. Once the command has ended, it warns and drops all further lines."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._command = command
        # A new session, so that the command survives Ctrl-C and gets the last lines of the training.
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
            warning(f"log: '|{self._command}' has ended; it gets no more lines")

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
