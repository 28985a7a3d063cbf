"""Which sequences of a dataset are used: those a list of tags names, and those that are neither too short nor too long."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy

from hvdtrain.data.plan.bounds import Limit
from hvdtrain.data.types import Array, Dataset
from hvdtrain.errors import DataError


def listed(dataset: Dataset, path: str | None) -> Array | None:
    """The sequences whose tags a file lists, one a line; all (None) without a file.

    Returns:
        int64 indices, ascending. Tags that the dataset does not have are passed over, as one list may serve several.

    Raises:
        DataError: the file cannot be read, or lists no tag of the dataset.
    """
    if path is None:
        return None
    wanted = read_tags(Path(path))
    found: list[int] = []
    block = 100_000  # strings of so many sequences at a time
    for first in range(0, dataset.num_sequences, block):
        tags = dataset.tags(range(first, min(first + block, dataset.num_sequences)))
        found += [first + place for place, tag in enumerate(tags) if tag in wanted]
    if not found:
        example = dataset.tags([0])[0]
        raise DataError(
            f"seq_list_filter_file: expected tags of the dataset, such as {example!r}, got none among the {len(wanted)} in {path}"
        )
    return numpy.array(found, dtype=numpy.int64)


def used(dataset: Dataset, subset: Array | None, full_epoch: int) -> Array | None:
    """The sequences that a full epoch is made of: those listed, or what the dataset draws for it; None: all.

    Raises:
        DataError: both.
    """
    draw = getattr(dataset, "drawn", None)
    drawn: Array | None = draw(full_epoch) if draw is not None else None
    if drawn is None:
        return subset
    if subset is not None:
        raise DataError("seq_list_filter_file: expected none beside sampling_sizes, got both")
    return drawn


def read_tags(path: Path) -> frozenset[str]:
    """The lines of a text file, which may be compressed with gzip (.gz). Raises: DataError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"seq_list_filter_file: expected a text file with a tag on each line, got {path}: {reason}") from None
    return frozenset(line.strip() for line in lines if line.strip())


def within(lengths: Mapping[str, Array], indices: Array, least: Limit, most: Limit) -> Array:
    """Those of `indices` whose sequences are in no data key shorter than `least` or longer than `most` (0: no limit)."""
    kept = numpy.ones(len(indices), dtype=bool)
    for limit, too_far in ((least, numpy.less), (most, numpy.greater)):
        by_key = limit if isinstance(limit, Mapping) else dict.fromkeys(lengths, limit or 0)
        for key, frames in by_key.items():
            if frames and key in lengths:
                kept &= ~too_far(lengths[key][indices], frames)
    return indices if kept.all() else indices[kept]
