"""Configs that are written for another program: plug-ins read them in hvdtrain's terms, before keys are checked."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hvdtrain.config.plugins import Registry
from hvdtrain.config.source import Source

Value = TypeVar("Value")


class Watch(Protocol):
    """Follows one config from its first import on."""

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""

    def translate(self, source: Source, keys: Collection[str], booleans: Collection[str]) -> Source:
        """The config in hvdtrain's terms, with problems, warnings and notes about the other program's.

        Args:
            keys: the names of hvdtrain's keys.
            booleans: the keys that are true or false.
        """


@dataclass(frozen=True)
class Translation:
    """What another program's configs mean.

    Attributes:
        aliases: by that program's name of a key, hvdtrain's name.
        explain: what hvdtrain does with a key of that program that has no counterpart; None: it is not one that is known.
        watch: makes the object that follows a config.
    """

    aliases: Mapping[str, str]
    explain: Callable[[str], str | None]
    watch: Callable[[], Watch]


TRANSLATIONS: Registry[Translation] = Registry("translations")
"""By the name of the other program."""

ALIASES: dict[str, str] = {name: key for each in TRANSLATIONS.values() for name, key in each.aliases.items()}
"""By another program's name of a key, hvdtrain's name."""


def translate_names(values: Mapping[str, Value]) -> dict[str, Value]:
    """Replace other programs' names of keys by hvdtrain's."""
    return {ALIASES.get(name, name): value for name, value in values.items()}


class Watches:
    """The watches of all programs over one config."""

    def __init__(self) -> None:
        self._watches = [each.watch() for each in TRANSLATIONS.values()]

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""
        return vars(builtins) | {name: made for watch in self._watches for name, made in watch.builtins(names).items()}

    def translate(self, source: Source, keys: Collection[str], booleans: Collection[str]) -> Source:
        """The config in hvdtrain's terms."""
        for watch in self._watches:
            source = watch.translate(source, keys, booleans)
        return source
