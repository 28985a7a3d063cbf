"""Parameters from other models' files: how the key `preload_from_files` (checkpoint/preload.py) asks a learner for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.comm.base import Tensor
from hvdtrain.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters and buffers, by name."""


@dataclass(frozen=True)
class PreloadNames:
    """Which tensors of another model's file to take.

    Attributes:
        sources: our names, with the file's name for each.
        renamed: the names that the file's tensors would have in our model, with their names in the file; without those to ignore.
    """

    sources: Mapping[str, str]
    renamed: Mapping[str, str]


MakeMissing = Callable[[str, tuple[int, ...], Mapping[str, Tensor]], Any]
"""Makes the values of a parameter that a file lacks, from its name, its shape, and the file's tensors by their names in our
model. Returns None to leave the parameter as it is."""


@dataclass(frozen=True)
class PreloadRequest:
    """Which parameters and buffers to copy from a file.

    Attributes:
        entry: take those in this entry of the file, if it has such an entry.
        choose: gets our shapes and the file's by name; returns which of them belong together.
        make: makes values for those of ours that are not in the file; None: they stay as they are.
    """

    file: Path
    entry: str | None
    choose: Callable[[Shapes, Shapes], PreloadNames]
    make: MakeMissing | None = None


PreloadFunction = Callable[[PreloadRequest], tuple[list[str], list[str]]]
"""A state's `preload`, or a function that does the same before there is a learner."""


def preload_values(request: PreloadRequest, ours: Shapes, theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values of our tensors, by name, that are taken from a file's, or made. Raises: CheckpointError."""
    names = request.choose(ours, shapes_of(theirs))
    values = {name: theirs[source] for name, source in names.sources.items()}
    if request.make is None:
        return values
    renamed = {name: theirs[source] for name, source in names.renamed.items()}
    for name in sorted(ours.keys() - values.keys()):
        made = request.make(name, ours[name], renamed)
        if made is None:
            continue
        if tuple(made.shape) != ours[name]:
            raise CheckpointError(
                f"custom_missing_load_func: expected values of shape {ours[name]} for {name}, got {tuple(made.shape)}"
            )
        values[name] = made
    return values


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
