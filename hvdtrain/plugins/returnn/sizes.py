"""Outputs with the sizes of others."""

from __future__ import annotations


def size_name(name: str, axis: int) -> str:
    """The name of the output with the sizes of an axis of another one (without the batch), one for each hypothesis."""
    return f"{name}:size{axis}"


def is_size(name: str) -> bool:
    """Whether an output has such a name."""
    return ":size" in name
