"""The plan of an epoch: which sequences form which batch, and which rank gets which batch.

Every rank computes the whole plan from the lengths (arithmetic, no reading) and takes its share. So each knows beforehand
how many steps everybody does, and where in the epoch everybody is: no messages, no hang, nothing dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from hvdtrain.config.keys import key, positive
from hvdtrain.data.order import OrderKeys, order
from hvdtrain.data.types import Array


@dataclass(frozen=True, kw_only=True)
class BatchKeys:
    """How sequences are gathered into batches. Sizes are per rank."""

    batch_size: int | dict[str, int] | None = key(
        None,
        "most padded frames in a rank's batch (longest sequence times number of sequences), for every data key or by key; "
        "None: no limit",
        positive,
    )
    max_seqs: int | None = key(None, "most sequences in a rank's batch; None: no limit", positive)

    def problems(self) -> list[str]:
        """What is wrong between the keys."""
        if self.batch_size is None and self.max_seqs is None:
            return ["batch_size: expected batch_size or max_seqs (one of them at least), got neither"]
        if isinstance(self.batch_size, dict) and any(not isinstance(size, int) or size < 1 for size in self.batch_size.values()):
            return [f"batch_size: expected a positive integer for every data key, got {self.batch_size}"]
        return []


@dataclass(frozen=True)
class Plan:
    """An epoch's batches: batch i is `order[bounds[i]:bounds[i + 1]]`.

    Attributes:
        order: indices of sequences, shape (number of sequences in the epoch,).
        bounds: shape (number of batches + 1,).
    """

    order: Array
    bounds: Array

    @property
    def num_batches(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: int) -> Array:
        """The indices of one batch's sequences."""
        return self.order[self.bounds[index] : self.bounds[index + 1]]

    def share(self, rank: int, size: int, start: int = 0) -> list[Array]:
        """The batches of one rank: batch i to rank i % size, counted from the `start` batches that are already done."""
        return [self.batch(i) for i in range(start + rank, self.num_batches, size)]

    def fingerprint(self) -> int:
        """A checksum, the same on two ranks if they made the same plan."""
        return zlib.crc32(self.bounds.tobytes(), zlib.crc32(self.order.tobytes()))


def plan(lengths: Mapping[str, Array], order_keys: OrderKeys, batch_keys: BatchKeys, epoch: int) -> Plan:
    """The plan of an epoch (counted from 1): a pure function of its arguments, the same on every rank.

    Args:
        lengths: by data key, number of frames of every sequence. Sorting goes by 'data', or by the first key without it.
    """
    by = lengths["data"] if "data" in lengths else next(iter(lengths.values()))
    indices = order(by, order_keys, epoch)
    return Plan(indices, bounds(lengths, indices, batch_keys.batch_size, batch_keys.max_seqs))


def bounds(lengths: Mapping[str, Array], indices: Array, batch_size: int | dict[str, int] | None, max_seqs: int | None) -> Array:
    """Where batches begin when sequences are gathered greedily, in order: RETURNN's rule.

    A batch is closed before the sequence with which its longest member times its number of members would exceed
    `batch_size` in any data key. A sequence that is too long by itself makes a batch of one.

    Returns:
        int64 of shape (number of batches + 1,): the first is 0, the last the number of sequences.
    """
    most = max_seqs or len(indices)
    # A common limit for all keys is a limit for each sequence's longest key: one column instead of several.
    if isinstance(batch_size, dict):
        columns = [(lengths[name][indices].tolist(), limit) for name, limit in batch_size.items() if name in lengths]
    elif batch_size is not None:
        longest = numpy.maximum.reduce([column[indices] for column in lengths.values()])
        columns = [(longest.tolist(), batch_size)]
    else:
        columns = []
    if len(columns) > 1:
        return _bounds_of_columns(len(indices), columns, most)
    if not columns:
        edges = numpy.arange(0, len(indices) + most, most) if len(indices) else numpy.zeros(1, dtype=numpy.int64)
        return numpy.minimum(edges, len(indices))
    column, limit = columns[0]
    starts = []
    count = most  # as if a full batch had just ended
    longest_so_far = 0
    for i, length in enumerate(column):
        if length > longest_so_far:
            longest_so_far = length
        if count >= most or longest_so_far * (count + 1) > limit:
            starts.append(i)
            count = 0
            longest_so_far = length
        count += 1
    return numpy.array([*starts, len(indices)], dtype=numpy.int64)


def _bounds_of_columns(size: int, columns: list[tuple[list[int], int]], most: int) -> Array:
    """`bounds` with a limit of its own for each of several data keys."""
    starts = []
    count = most
    longest = [0] * len(columns)
    for i in range(size):
        here = [column[i] for column, _ in columns]
        longest = [max(pair) for pair in zip(longest, here, strict=True)]
        full = any(length * (count + 1) > limit for length, (_, limit) in zip(longest, columns, strict=True))
        if count >= most or full:
            starts.append(i)
            count = 0
            longest = here
        count += 1
    return numpy.array([*starts, size], dtype=numpy.int64)
