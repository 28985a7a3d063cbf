"""Choosing one of a framework's classes by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError


def class_of(wanted: Any, known: Mapping[str, type], what: str) -> Any:
    """The class that is wanted: itself, or its name in any case.

    Args:
        known: the classes by their names in lower case.
        what: the key, for the message.

    Raises:
        ConfigError: there is none of that name.

    >>> class_of("INT", {"int": int}, "number"), class_of(float, {"int": int}, "number")
    (<class 'int'>, <class 'float'>)
    """
    chosen = wanted if isinstance(wanted, type) else known.get(str(wanted).lower())
    if chosen is None:
        hint = did_you_mean(str(wanted).lower(), known)
        raise ConfigError([f"{what}: expected one of {', '.join(sorted(known))}, got {wanted!r}{hint}"])
    return chosen
