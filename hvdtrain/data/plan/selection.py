"""The sequences that an epoch has: selected by a list of tags, by the dataset itself, and by length."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import text_lines
from hvdtrain.data.plan.batch_keys import Limit
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError


def find_listed(dataset: Dataset, path: str | None) -> Array | None:
    """The sequences whose tags a file lists, one per line; None (all) without a file.

    Returns:
        int64 indices, ascending. Tags that the dataset does not have are ignored, so that several datasets can share a list.

    Raises:
        DataError: the file cannot be read, or lists no tag of the dataset.
    """
    if path is None:
        return None
    wanted = read_tags(Path(path))
    listed: list[int] = []
    block = 100_000  # tags read at once
    for first in range(0, dataset.num_sequences, block):
        tags = dataset.tags(range(first, min(first + block, dataset.num_sequences)))
        listed += [first + number for number, tag in enumerate(tags) if tag in wanted]
    if not listed:
        example = dataset.tags([0])[0]
        raise DataError(
            f"seq_list_filter_file: expected tags of the dataset, such as {example!r}, got none among the {len(wanted)} in {path}"
        )
    return numpy.array(listed, dtype=numpy.int64)


def epoch_subset(dataset: Dataset, subset: Array | None, full_epoch: int) -> Array | None:
    """The sequences of a full epoch: those that are listed, or those that the dataset selects; None: all.

    Raises:
        DataError: the sequences are both listed and selected.
    """
    selected = dataset.selected(full_epoch)
    if selected is None:
        return subset
    if subset is not None:
        raise DataError("seq_list_filter_file: expected none with sampling_sizes, got both")
    return selected


def read_tags(path: Path) -> frozenset[str]:
    """The lines of a text file, possibly compressed with gzip (.gz). Raises: DataError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = text_lines(content)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"seq_list_filter_file: expected a text file with a tag on each line, got {path}: {reason}") from None
    return frozenset(line.strip() for line in lines if line.strip())


def select_by_length(lengths: Mapping[str, Array], indices: Array, least: Limit, most: Limit) -> Array:
    """Those of `indices` whose sequences are not shorter than `least` or longer than `most` (0: no limit) in any data key."""
    is_kept = numpy.ones(len(indices), dtype=bool)
    for limit, violates in ((least, numpy.less), (most, numpy.greater)):
        by_key = limit if isinstance(limit, Mapping) else dict.fromkeys(lengths, limit or 0)
        for name, frames in by_key.items():
            if frames and name in lengths:
                is_kept &= ~violates(lengths[name][indices], frames)
    return indices if is_kept.all() else indices[is_kept]
