"""Files that keys name, and that the program writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import ConfigError


@contextmanager
def writable(key: str, path: Path) -> Iterator[None]:
    """Around what writes the file of a key. Raises: ConfigError, if that fails."""
    try:
        yield
    except OSError as error:
        raise ConfigError.of("not-writable", f"{key}: expected a writable file, got {path}: {error.strerror}") from None
