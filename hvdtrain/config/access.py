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
        value = self._values.get(name, default)
        if isinstance(value, (list, tuple)):
            return ",".join(str(member) for member in value)
        return value if value is None or value is default else str(value)

    def bool(self, name: str, default: Any = None) -> Any:
        """The value as a bool, from a bool, a number or one of true/yes/on/1, false/no/off/0."""
        value = self._values.get(name, default)
        if isinstance(value, str):
            if value.lower() not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
                raise ValueError(f"{name}: expected true or false, got {value!r}")
            return value.lower() in ("true", "yes", "on", "1")
        return value if value is None else builtins.bool(value)

    def is_true(self, name: str) -> builtins.bool:
        """Like `bool`, but False if the name has no value."""
        return builtins.bool(self.bool(name))

    def int(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name, default)
        return value if value is None else builtins.int(value)

    def float(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name, default)
        return value if value is None else builtins.float(value)

    def list(self, name: str, default: Any = None) -> Any:
        """The value as a list; a string is split at commas."""
        value = self._values.get(name, default)
        if isinstance(value, str):
            return value.split(",")
        return value if value is None else builtins.list(value)
