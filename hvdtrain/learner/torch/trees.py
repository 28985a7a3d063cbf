"""Batches that a `collate` function returned: tensors in dicts, lists, tuples and objects of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

Change = Callable[[torch.Tensor], torch.Tensor]


def change_tensors(tree: Any, change: Change) -> Any:
    """A copy of a tree with other tensors. Objects of other kinds stay as they are."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        made = {key: change_tensors(value, change) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return made
        same = copy.copy(tree)  # keeps what else it has, such as a BatchEncoding's lengths
        same.update(made)
        return same
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(change_tensors(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(change_tensors(value, change) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{each.name: change_tensors(getattr(tree, each.name), change) for each in fields(tree)})
    return tree


def moved(tree: Any, device: torch.device) -> Any:
    """A tree on a device; objects that have a method `to` move themselves."""
    if not isinstance(tree, (torch.Tensor, Mapping, list, tuple)) and not is_dataclass(tree) and hasattr(tree, "to"):
        there = tree.to(device)
        return tree if there is None else there
    return change_tensors(tree, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(tree: Any) -> Any:
    """A tree in pinned memory, from which a GPU copies directly."""
    if not isinstance(tree, (torch.Tensor, Mapping, list, tuple)) and not is_dataclass(tree) and hasattr(tree, "pin_memory"):
        return tree.pin_memory()
    return change_tensors(tree, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree; those of objects of other kinds among their attributes."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    change_tensors(tree, keep)
    if not found and hasattr(tree, "__dict__"):
        change_tensors(vars(tree), keep)
    yield from found
