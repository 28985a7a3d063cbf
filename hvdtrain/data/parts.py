"""Epochs over whole files: which files belong to which part of the data. A pure function of lengths, seed and number."""

from __future__ import annotations

import numpy

from hvdtrain.data.types import Array, Dataset
from hvdtrain.errors import DataError


def file_bounds(dataset: Dataset) -> Array:
    """Where each file's sequences begin, and where those of the last one end; one file where the dataset knows of none."""
    whole = numpy.array([0, dataset.num_sequences], dtype=numpy.int64)
    return getattr(dataset, "group_bounds", whole)


def part_of_files(lengths: Array, which: Array, count: int, number: int, generator: numpy.random.RandomState | None) -> Array:
    """The sequences of one of `count` parts, each a number of whole files; file after file, in the order they were dealt in.

    The files come in random order, or in their own without a generator, and are cut where the parts are of about the same
    number of frames: each has one file at least. Files none of whose sequences are used do not count.

    Args:
        lengths: frames of every sequence that is used.
        which: the file of every sequence.
        number: which part, counted from 0.

    Returns:
        int64 places in `lengths`.

    Raises:
        DataError: there are fewer files than parts.
    """
    used = numpy.unique(which)
    if count > len(used):
        raise DataError(
            f"partition_epoch: expected at most {len(used)}, the number of files (partition_by is 'files'), got {count}"
        )
    dealt = used if generator is None else generator.permutation(used)
    frames = numpy.bincount(which, weights=lengths)[dealt]
    cuts = _cuts(frames, count)
    chosen = dealt[cuts[number] : cuts[number + 1]]
    turn = numpy.full(int(used[-1]) + 1, -1, dtype=numpy.int64)
    turn[chosen] = numpy.arange(len(chosen))
    places = numpy.flatnonzero(turn[which] >= 0)
    return places[numpy.argsort(turn[which[places]], kind="stable")]


def _cuts(sizes: Array, count: int) -> Array:
    """Where to cut a row of things into parts of about the same size, none of them empty; shape (count + 1,).

    >>> _cuts(numpy.array([1, 1, 1, 9, 1, 1]), 3).tolist(), _cuts(numpy.array([0, 0, 5]), 3).tolist()
    ([0, 3, 4, 6], [0, 1, 2, 3])
    """
    middles = numpy.cumsum(sizes) - sizes / 2
    wanted = sizes.sum() * numpy.arange(1, count) / count
    inner = numpy.arange(count - 1)
    cuts = numpy.maximum.accumulate(numpy.maximum(numpy.searchsorted(middles, wanted), 1) - inner) + inner
    cuts = numpy.minimum(cuts, len(sizes) - (count - 1) + inner)
    return numpy.concatenate([[0], cuts, [len(sizes)]]).astype(numpy.int64)
