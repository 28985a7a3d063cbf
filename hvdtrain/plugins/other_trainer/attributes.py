"""Numbers and texts that the user's objects keep in attributes, such as a counter, or the decay of an average that falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

NOT_THEIRS = ("training", "_current_fx_name")
"""Attributes that have other owners."""


class Attributes:
    """What a training changes of them, so that a resumed one goes on with it. Lists and other objects are not kept.

    Args:
        objects: by name, as they are when the training begins.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._initial = self._values()

    def _values(self) -> dict[str, Any]:
        return {
            f"{owner}.{name}": value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for owner, one in self._objects.items()
            for name, value in vars(one).items()
            if name not in NOT_THEIRS and is_plain(value)
        }

    def changed(self) -> dict[str, Any]:
        """Those that have other values than at the beginning, by name."""
        return {
            name: value
            for name, value in self._values().items()
            if name not in self._initial or not is_same(value, self._initial[name])
        }

    def load(self, of_ranks: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
        """Set what `changed` returned on all ranks: on as many ranks, each its own, else what was alike on all of them."""
        first = of_ranks[0]
        alike = [name for name in first if all(name in of_rank and is_same(of_rank[name], first[name]) for of_rank in of_ranks)]
        values = of_ranks[rank] if len(of_ranks) == size else {name: first[name] for name in alike}
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")
            if owner in self._objects:
                vars(self._objects[owner])[attribute] = value


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, also as a tensor."""
    return value is None or type(value) in (bool, int, float, str) or (type(value) is torch.Tensor and not value.ndim)


def is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
