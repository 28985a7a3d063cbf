"""What a job, or reading its config, changes in the process of a program: restored at the end; and the log of the job."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

from hvdtrain.config.large_imports import file_of
from hvdtrain.config.overrides import CHANGED, REPLACED
from hvdtrain.config.source import MODULE_NAME
from hvdtrain.runtime.log import LEVELS, LOGGER

TO_PROGRAM = {LEVELS[1]: logging.INFO}
"""The level that a program's handlers get, by level of the record: scores come first in `log_verbosity`, but are no errors."""


class ToProgram(logging.Handler):
    """Passes records on to the handlers that the logger `hvdtrain` and its parents have when this is constructed."""

    def __init__(self) -> None:
        super().__init__()
        self._handlers = list(LOGGER.handlers)
        self._above = LOGGER.parent if LOGGER.propagate else None
        self._least = LOGGER.getEffectiveLevel()

    def emit(self, record: logging.LogRecord) -> None:
        record = copy(record)
        record.levelno = TO_PROGRAM.get(record.levelno, record.levelno)
        record.levelname = logging.getLevelName(record.levelno)
        if record.levelno < self._least:
            return
        for handler in self._handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        if self._above is not None:
            self._above.callHandlers(record)


@contextmanager
def programs_log() -> Iterator[None]:
    """Restore the configuration of the program's logger `hvdtrain` at the end of a job in its process."""
    handlers = list(LOGGER.handlers)
    level = LOGGER.level
    propagate = LOGGER.propagate
    try:
        yield
    finally:
        for handler in set(LOGGER.handlers) - set(handlers):
            handler.close()
        LOGGER.handlers[:] = handlers
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


@contextmanager
def separate_imports(configs: Iterable[Path]) -> Iterator[None]:
    """Forget at the end what these configs imported from their folders: those of another one may have the same names.

    What the program itself finds there stays, unless an override has changed it; with that, its whole package is forgotten.
    Modules that the program has imported before get their constants back.
    """
    path = list(sys.path)
    modules = set(sys.modules)
    try:
        yield
    finally:
        folders = {str(config.resolve().parent) for config in configs} - (set() if CHANGED else set(path))
        packages = {name.partition(".")[0] for name in CHANGED}
        CHANGED.clear()
        while REPLACED:
            names, name, value = REPLACED.pop()
            names[name] = value
        sys.path[:] = path
        for name in set(sys.modules) - modules - {MODULE_NAME}:
            file = file_of(sys.modules[name]) or ""
            is_theirs = any(Path(file).is_relative_to(folder) for folder in folders) and not file.startswith(sys.prefix)
            if is_theirs or name.partition(".")[0] in packages:
                del sys.modules[name]
