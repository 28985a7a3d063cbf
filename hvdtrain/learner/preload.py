"""Parameters from other models' files: the requests of the key `preload_from_files` (plug-in preload) to a learner."""

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
        sources: by our name, the name in the file.
        renamed: by the name that a tensor of the file would have in our model, its name in the file; without ignored ones.
    """

    sources: Mapping[str, str]
    renamed: Mapping[str, str]


MakeMissing = Callable[[str, tuple[int, ...], Mapping[str, Tensor]], Any]
"""Makes the values of a parameter that is missing from a file, given its name, its shape, and the file's tensors by our names.
Returns None to leave the parameter as it is."""


@dataclass(frozen=True)
class PreloadRequest:
    """Which parameters and buffers to copy from a file.

    Attributes:
        entry: the entry of the file to look in, if the file has it.
        choose: matches our tensors with the file's, given their shapes by name.
        make: makes values for parameters that are not in the file; None: they keep their values.
    """

    file: Path
    entry: str | None
    choose: Callable[[Shapes, Shapes], PreloadNames]
    make: MakeMissing | None = None


PreloadFunction = Callable[[PreloadRequest], tuple[list[str], list[str]]]
"""The `preload` of a state, or a function that does the same before there is a learner."""


def preload_values(request: PreloadRequest, ours: Shapes, theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The values to set, by our name: taken from the file, or made. Raises: CheckpointError."""
    names = request.choose(ours, shapes_of(theirs))
    values = {name: theirs[source] for name, source in names.sources.items()}
    if request.make is None:
        return values
    renamed = {name: theirs[source] for name, source in names.renamed.items()}
    for name in sorted(ours.keys() - values.keys()):
        value = request.make(name, ours[name], renamed)
        if value is None:
            continue
        if tuple(value.shape) != ours[name]:
            raise CheckpointError(
                f"custom_missing_load_func: expected values of shape {ours[name]} for {name}, got {tuple(value.shape)}"
            )
        values[name] = value
    return values


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
