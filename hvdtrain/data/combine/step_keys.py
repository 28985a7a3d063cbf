"""The keys of the steps that the `map_seq` of a MapDataset may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.config.plugins import Registry
from hvdtrain.errors import Problem


@dataclass(frozen=True, kw_only=True)
class StepKeys:
    """The base of the keys of every kind of step."""

    opener: ClassVar[str]
    """'module:class' of the step, which gets its keys."""

    @property
    def reads(self) -> list[str]:
        """The names of the datasets in `datasets` of the MapDataset that the step reads."""
        return []

    def problems(self) -> list[Problem]:
        """Conflicts among the keys."""
        return []


STEPS: Registry[type[StepKeys]] = Registry("steps")
"""The keys of each kind of step, by the name that its dict has as 'class'."""
