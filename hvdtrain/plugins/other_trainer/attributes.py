"""What the user's objects keep in attributes: a counter, the decay of an average that falls, the losses of an epoch in a list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.learner.torch.trees import change_leaves, tensors_in

OWNED_BY_OTHERS = frozenset(vars(torch.nn.Module())) | {"_current_fx_name"}

ON_DEVICE = "on the device"
"""Among the attributes of a checkpoint: the names of those with tensors that were not on the CPU."""


class Attributes:
    """What a training changes of them after this is made, for a resumed one to go on with: numbers, texts, and lists and dicts
    of these and of tensors. Other objects are not kept.

    Args:
        objects: by name.
        without_lists: those that may hold the data in lists.
    """

    def __init__(self, objects: Mapping[str, Any], without_lists: Collection[str] = ()) -> None:
        self._objects = objects
        self._without_lists = without_lists
        self._initial = self._values()

    def _values(self) -> dict[str, Any]:
        """Copies of them."""
        return {
            f"{owner}.{name}": change_tensors(value, lambda tensor: tensor.detach().clone())
            for owner, user_object in self._objects.items()
            for name, value in vars(user_object).items()
            if name not in OWNED_BY_OTHERS and (is_plain(value) or (owner not in self._without_lists and is_nested(value)))
        }

    def changed(self) -> dict[str, Any]:
        """Those that have other values than at the beginning, by name."""
        return {name: value for name, value in self._values().items() if not has_same(self._initial, name, value)}

    def load(self, by_rank: Sequence[Mapping[str, Any]], rank: int, size: int, device: torch.device) -> None:
        """Set what `saved` made of all ranks' attributes: on as many ranks, each its own, else what was alike on all of them."""
        alike = {name: value for name, value in by_rank[0].items() if all(has_same(of_rank, name, value) for of_rank in by_rank)}
        on_device = by_rank[0].get(ON_DEVICE, ())
        for name, value in (by_rank[rank] if len(by_rank) == size else alike).items():
            owner, _, attribute = name.rpartition(".")
            if owner not in self._objects:
                continue
            if name in on_device:
                value = change_tensors(value, lambda tensor: tensor.to(device))
            present = vars(self._objects[owner])
            if isinstance(present.get(attribute), dict) and type(value) is dict:  # it may be a defaultdict
                present[attribute].clear()
                present[attribute].update(value)
            else:
                present[attribute] = value


def saved(changed: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes for a checkpoint, with all tensors on the CPU."""
    on_device = [name for name, value in changed.items() if any(tensor.device.type != "cpu" for tensor in tensors_in(value))]
    return {name: change_tensors(value, torch.Tensor.cpu) for name, value in changed.items()} | {ON_DEVICE: on_device}


def change_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A copy with other tensors; of a defaultdict or the like, a dict."""
    value = dict(value) if isinstance(value, dict) else value
    return change_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def is_plain(value: Any) -> bool:
    """Whether it is a number or a text, also as a tensor."""
    return value is None or type(value) in (bool, int, float, str) or (type(value) is torch.Tensor and not value.ndim)


def has_same(values: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in values and is_same(values[name], value)


DEEPEST = 20
"""Levels of lists in lists, beyond which they are not kept: one may contain itself."""


def is_nested(value: Any, levels: int = DEEPEST) -> bool:
    """Whether it is a list or a dict of plain values and of tensors. None within it has another class: a checkpoint has none.

    >>> itself: list[object] = [1]
    >>> itself.append(itself)
    >>> is_nested([{"n": 1}, [2.0]]), is_nested(itself)
    (True, False)
    """
    if isinstance(value, dict):
        return all(type(key) in (int, str) for key in value) and is_nested(list(value.values()), levels)
    return type(value) in (list, tuple) and all(
        is_plain(entry)
        or type(entry) is torch.Tensor
        or (levels > 0 and type(entry) in (dict, list, tuple) and is_nested(entry, levels - 1))
        for entry in value
    )


def is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.device) == (other.dtype, other.device) and torch.equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(is_same(entry, other[key]) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(is_same, value, other))
    return bool(value == other)
