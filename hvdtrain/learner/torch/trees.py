"""Batches that a `collate` function returned: tensors in dicts, lists, tuples, dataclasses and objects of other kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch

Change = Callable[[Any], Any]


def change_leaves(tree: Any, change: Change) -> Any:
    """A copy of a tree with other leaves: tensors, and what is no container. A container that has a method `to`, such as a
    PackedSequence, is a leaf, unless it is a mapping.
    """
    if isinstance(tree, Mapping):
        changed = {key: change_leaves(value, change) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return changed
        same = copy.copy(tree)  # keeps what else it has, such as a BatchEncoding's lengths
        for key, value in changed.items():
            same[key] = value
        return same
    if isinstance(tree, (torch.Tensor, type)) or hasattr(tree, "to"):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(change_leaves(value, change) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(change_leaves(value, change) for value in tree)
    if is_dataclass(tree):
        twin: Any = copy.copy(tree)  # without a call of its constructor, which may take or do something else
        for each in fields(tree):
            object.__setattr__(twin, each.name, change_leaves(getattr(tree, each.name), change))
        return twin
    return change(tree)


def sent(tree: Any, device: torch.device) -> Any:
    """A tree whose tensors are being copied to a device. Objects that move themselves stay: their tensors, which only they know,
    must belong to the stream that uses them.
    """
    return change_leaves(tree, lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf)


def moved(tree: Any, device: torch.device) -> Any:
    """A tree on a device; objects that have a method `to` move themselves."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        on_device = leaf.to(device) if _has(leaf, "to") else None
        return leaf if on_device is None else on_device

    return change_leaves(tree, move)


def pinned(tree: Any) -> Any:
    """A tree in pinned memory, from which a GPU copies directly."""

    def pin(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return pinned_copy(leaf) if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
        pinned = leaf.pin_memory() if _has(leaf, "pin_memory") else None
        return leaf if pinned is None else pinned

    return change_leaves(tree, pin)


def pinned_copy(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, by numpy, in one thread: Tensor.pin_memory copies with all threads, which are the training's."""
    copied = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    try:
        numpy.copyto(copied.numpy(), values.numpy())
    except (TypeError, RuntimeError):  # a type that numpy does not have, such as bfloat16
        copied.copy_(values.detach())
    return copied


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, without those inside objects that move themselves."""
    leaves: list[Any] = []

    def keep(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    change_leaves(tree, keep)
    return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _has(leaf: Any, method: str) -> bool:
    return not isinstance(leaf, type) and callable(getattr(leaf, method, None))


def without_numpy(value: Any) -> Any:
    """A value for a file, with Python's numbers in place of numpy's, which a file that runs no code cannot have: a schedule that
    computes with numpy puts them into an optimizer.

    >>> without_numpy({"lr": numpy.float64(0.5), "betas": (0.9, numpy.float32(0.5))})
    {'lr': 0.5, 'betas': (0.9, 0.5)}
    """
    if isinstance(value, numpy.generic):
        return value.item()
    if type(value) is dict:
        return {name: without_numpy(entry) for name, entry in value.items()}
    return type(value)(map(without_numpy, value)) if type(value) in (list, tuple) else value
