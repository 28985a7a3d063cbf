"""The log of a job in a program's process."""

from __future__ import annotations

import logging
from copy import copy

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
