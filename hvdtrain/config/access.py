"""The `config` that a config file itself may read."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any


class ConfigAccess:
    """The `config` that a config file sees: overrides from the command line, earlier files and the names set so far."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> builtins.bool:
        """Whether the name has a value."""
        return name in self._values

    def typed_value(self, name: str, default: Any = None) -> Any:
        """The value without conversion."""
        return self._values.get(name, default)

    opt_typed_value = typed_value

    @property
    def typed_dict(self) -> Mapping[str, Any]:
        return self._values

    def value(self, name: str, default: Any = None) -> Any:
        """The value as a string; a list is joined by commas."""
        found = self._values.get(name, default)
        if isinstance(found, (list, tuple)):
            return ",".join(str(member) for member in found)
        return found if found is None or found is default else str(found)

    def bool(self, name: str, default: Any = None) -> Any:
        """The value as a bool, from a bool, a number or one of true/yes/on/1, false/no/off/0."""
        found = self._values.get(name, default)
        if isinstance(found, str):
            if found.lower() not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
                raise ValueError(f"{name}: expected true or false, got {found!r}")
            return found.lower() in ("true", "yes", "on", "1")
        return found if found is None else builtins.bool(found)

    def is_true(self, name: str) -> builtins.bool:
        """Like `bool`, but False if the name has no value."""
        return builtins.bool(self.bool(name))

    def int(self, name: str, default: Any = None) -> Any:
        found = self._values.get(name, default)
        return found if found is None else builtins.int(found)

    def float(self, name: str, default: Any = None) -> Any:
        found = self._values.get(name, default)
        return found if found is None else builtins.float(found)

    def list(self, name: str, default: Any = None) -> Any:
        """The value as a list; a string is split at commas."""
        found = self._values.get(name, default)
        if isinstance(found, str):
            return found.split(",")
        return found if found is None else builtins.list(found)
