"""Configs that are written for other programs, as the plug-ins that are there read them."""

from __future__ import annotations

import builtins
from collections.abc import Collection
from typing import Any

from hvdtrain.config.plugins import Registry
from hvdtrain.config.source import Source
from hvdtrain.config.translation import Translation

TRANSLATIONS: Registry[Translation] = Registry("translations")
"""By the name of the other program."""

ALIASES: dict[str, str] = {name: key for each in TRANSLATIONS.values() for name, key in each.aliases.items()}
"""By another program's name of a key, hvdtrain's name."""


class Watches:
    """The watches of all programs over one config."""

    def __init__(self) -> None:
        self._watches = [each.watch() for each in TRANSLATIONS.values()]

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""
        return vars(builtins) | {name: function for watch in self._watches for name, function in watch.builtins(names).items()}

    def translate(self, source: Source, keys: Collection[str], booleans: Collection[str]) -> Source:
        """The config in hvdtrain's terms."""
        for watch in self._watches:
            source = watch.translate(source, keys, booleans)
        return source
