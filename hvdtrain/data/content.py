"""What is wrong with the values in a dataset: classes that do not exist, numbers that are none, tags that stand twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy

from hvdtrain.data.layout import extremes
from hvdtrain.data.types import Array, Dataset
from hvdtrain.errors import DataError

SAMPLE = 300
"""How many sequences are looked at where not all are."""

BLOCK = 10_000
"""Tags read at once."""


def look(path: Path, dataset: Dataset, everything: bool) -> tuple[list[str], list[str]]:
    """Problems, for which a file cannot be converted, and warnings.

    All class indices are looked at; other values in a sample of sequences spread over the file, or in all where
    `everything` is asked for.
    """
    count = dataset.num_sequences
    sample = range(count) if everything else numpy.unique(numpy.linspace(0, count - 1, SAMPLE, dtype=numpy.int64)).tolist()
    sparse = [key for key, stream in dataset.streams.items() if stream.sparse and key != "sizes"]
    odd: Counter[str] = Counter()
    where: dict[str, int] = {}
    try:
        classes = {key: extremes(path, key) for key in sparse}
        for index in sample:
            for key, values in dataset.sequence(index).items():
                if values.dtype.kind in "fc" and not numpy.isfinite(values).all():
                    odd[key] += 1
                    where.setdefault(key, index)
    except DataError as error:
        return [str(error)], []
    problems: list[str] = []
    warnings: list[str] = []
    for key, found in classes.items():
        dim = dataset.streams[key].dim
        if found is not None and not 0 <= found[0] <= found[1] < dim:
            told = f"{path}: expected classes from 0 to {dim - 1} for {key!r}, got {found[0]} to {found[1]}"
            # Writers that do not know the dimension put 1; a copy then gets the largest class plus one.
            (warnings if dim == 1 else problems).append(told)
    for key, number in sorted(odd.items()):
        tag = dataset.tags([where[key]])[0]
        warnings.append(f"NaN or infinity for {key!r} in {number} of {len(sample)} sequences looked at, the first is {tag!r}")
    twice = _twice(dataset)
    if twice:
        some = ", ".join(repr(tag) for tag in twice[:3])
        warnings.append(f"{len(twice)} tags stand more than once, such as {some}: sequences cannot be told apart by tag")
    return problems, warnings


def _twice(dataset: Dataset) -> list[str]:
    """Tags of more than one sequence. Eight bytes a sequence are kept, not the tags."""
    hashes = numpy.fromiter((hash(tag) for tag in _tags(dataset)), numpy.int64, dataset.num_sequences)
    values, counts = numpy.unique(hashes, return_counts=True)
    suspects = values[counts > 1]
    if not len(suspects):
        return []
    suspect: set[int] = set(suspects.tolist())
    times = Counter(tag for tag in _tags(dataset) if hash(tag) in suspect)
    return [tag for tag, number in times.items() if number > 1]


def _tags(dataset: Dataset) -> Iterator[str]:
    for start in range(0, dataset.num_sequences, BLOCK):
        yield from dataset.tags(range(start, min(start + BLOCK, dataset.num_sequences)))


def spread(lengths: Array) -> dict[str, float]:
    """The lengths of sequences in a few numbers.

    >>> spread(numpy.array([1, 2, 9]))
    {'least': 1, 'most': 9, 'mean': 4.0, 'median': 2.0}
    """
    return {
        "least": int(lengths.min()),
        "most": int(lengths.max()),
        "mean": float(lengths.mean()),
        "median": float(numpy.median(lengths)),
    }
