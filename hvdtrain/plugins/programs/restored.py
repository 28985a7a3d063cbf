"""What a job, or reading its config, changes in the process of a program: restored at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.config.large_imports import file_of
from hvdtrain.config.overrides import CHANGED, REPLACED
from hvdtrain.config.source import MODULE_NAME
from hvdtrain.runtime.log import LOGGER


@contextmanager
def programs_log() -> Iterator[None]:
    """Restore the configuration of the program's logger `hvdtrain` at the end of a job in its process."""
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
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
