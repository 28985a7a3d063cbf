"""Another program, whose configs say `passes` where hvdtrain says `num_epochs`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.config.source import Source
from hvdtrain.config.translation import Translation

ALIASES = {"passes": "num_epochs"}


class Watch:
    """Sees to the names of keys."""

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        return {}

    def translate(self, source: Source, keys: Collection[str], booleans: Collection[str]) -> Source:
        return replace(source, values=_renamed(source.values), origins=_renamed(source.origins))


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {ALIASES.get(name, name): value for name, value in values.items()}


PROGRAM = Translation(ALIASES, {"rounds": "a key of the other program"}.get, Watch)
