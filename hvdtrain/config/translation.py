"""Configs that are written for another program: plug-ins read them in hvdtrain's terms, before keys are checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.config.source import Source


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
