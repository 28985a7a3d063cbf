"""Numbers and texts that the user's objects keep in attributes, such as a counter, or the decay of an average that falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

OWNED_BY_OTHERS = ("training", "_current_fx_name")


class Attributes:
    """What a training changes of them after this is made, so that a resumed one goes on with it; not lists and other objects."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._initial = self._values()

    def _values(self) -> dict[str, Any]:
        return {
            f"{owner}.{name}": value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for owner, user_object in self._objects.items()
            for name, value in vars(user_object).items()
            if name not in OWNED_BY_OTHERS and is_plain(value)
        }

    def changed(self) -> dict[str, Any]:
        """Those that have other values than at the beginning, by name."""
        return {name: value for name, value in self._values().items() if not has_same(self._initial, name, value)}

    def load(self, by_rank: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
        """Set what `changed` returned on all ranks: on as many ranks, each its own, else what was alike on all of them."""
        alike = {name: value for name, value in by_rank[0].items() if all(has_same(of_rank, name, value) for of_rank in by_rank)}
        for name, value in (by_rank[rank] if len(by_rank) == size else alike).items():
            owner, _, attribute = name.rpartition(".")
            if owner in self._objects:
                vars(self._objects[owner])[attribute] = value


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, also as a tensor."""
    return value is None or type(value) in (bool, int, float, str) or (type(value) is torch.Tensor and not value.ndim)


def has_same(values: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in values and type(values[name]) is type(value) and bool(values[name] == value)
