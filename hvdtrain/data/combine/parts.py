"""Helpers for datasets that consist of several parts, one after the other.

`bounds` holds the index of the first sequence of every part, then the number of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError


def refuse_selection(where: str, dataset: Dataset, reason: str) -> None:
    """Raises: DataError, if a dataset selects some of its sequences for an epoch, where that would not count.

    Args:
        where: its config key.
    """
    if dataset.selected(1) is not None:
        raise DataError(f"{where}: expected a dataset without sampling_sizes, got them ({reason})")


def split(indices: Sequence[int] | Array, bounds: Sequence[int] | Array) -> Iterator[tuple[int, Array, Array]]:
    """For each part that contains some of the indices: its number, the positions of these indices, and their indices in the
    part."""
    wanted = numpy.asarray(indices, dtype=numpy.int64)
    owners = numpy.searchsorted(bounds, wanted, side="right") - 1
    by_part = numpy.argsort(owners, kind="stable")
    ordered = owners[by_part]
    begins = numpy.flatnonzero(numpy.append(-1, ordered[:-1]) != ordered).tolist() if len(ordered) else []
    for begin, end in pairwise([*begins, len(ordered)]):
        part = int(ordered[begin])
        rows = by_part[begin:end]
        yield part, rows, wanted[rows] - bounds[part]


def concatenate_tags(
    indices: Sequence[int], bounds: Sequence[int] | Array, read: Callable[[int, Array], Sequence[str]]
) -> list[str]:
    """`Dataset.tags` of a concatenation. `read` gets a part's number and indices in the part."""
    tags = [""] * len(indices)
    for part, rows, inside in split(indices, bounds):
        for row, tag in zip(rows, read(part, inside), strict=True):
            tags[row] = tag
    return tags


def concatenate_tag_bytes(start: int, stop: int, bounds: Sequence[int] | Array, read: Callable[[int, int, int], Array]) -> Array:
    """`Dataset.tag_bytes` of a concatenation. `read` gets a part's number, and where to start and stop in the part."""
    parts = []
    for part in range(len(bounds) - 1):
        begin, end = max(start, int(bounds[part])), min(stop, int(bounds[part + 1]))
        if begin < end:
            parts.append(read(part, begin - int(bounds[part]), end - int(bounds[part])))
    return numpy.concatenate(parts) if parts else numpy.zeros(0, dtype="S1")
