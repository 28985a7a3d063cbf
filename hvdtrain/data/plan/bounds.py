"""The bounds of batches under the limits of the config, and the order of batches. RETURNN's rules, vectorized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from hvdtrain.data.types import Array

Limit = int | Mapping[str, int] | None
"""A limit for every data key, by data key, or none."""

NO_LIMIT = 2**62


@dataclass(frozen=True)
class Limits:
    """The limits of a batch. Each is checked for every data key that it applies to.

    Attributes:
        batch_size: maximal number of padded frames (longest sequence times number of sequences).
        max_seqs: maximal number of sequences.
        packed_batch_size: maximal number of frames without padding.
        max_pad_size: maximal number of frames of padding.
    """

    batch_size: Limit = None
    max_seqs: int | None = None
    packed_batch_size: Limit = None
    max_pad_size: Limit = None


def bounds(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> Array:
    """Where batches begin when they are filled greedily with sequences in order, each as large as the limits allow.

    A batch ends before the sequence with which it would exceed a limit in any data key. A sequence that exceeds a limit by
    itself makes a batch of one.

    Args:
        lengths: by data key, number of frames of every sequence.
        indices: of the sequences, in order; shape (number of sequences in the epoch,).

    Returns:
        int64 of shape (number of batches + 1,): the first is 0, the last the number of sequences.
    """
    size = len(indices)
    if limits.max_pad_size is not None:
        return _ended(_starts_with_padding(lengths, indices, limits), size)
    if limits.batch_size is None and limits.packed_batch_size is None:
        most = limits.max_seqs or max(1, size)
        return _ended(range(0, size, most), size)
    caps = _caps(lengths, indices, limits).tolist()
    return _ended(_starts(caps, _ends(lengths, indices, limits.packed_batch_size)), size)


def too_long(lengths: Mapping[str, Array], limits: Limits) -> int:
    """The number of sequences that exceed `batch_size` or `packed_batch_size` by themselves."""
    found = numpy.zeros(len(next(iter(lengths.values()))), dtype=bool)
    for limit in (limits.batch_size, limits.packed_batch_size):
        for key, most in _by_key(lengths, limit).items():
            found |= lengths[key] > most
    return int(found.sum())


def _ended(starts: range | list[int], size: int) -> Array:
    return numpy.array([*starts, size], dtype=numpy.int64)


def _columns(lengths: Mapping[str, Array], indices: Array, limit: Limit) -> list[tuple[Array, int]]:
    """The lengths in order, int64, for every data key that has the limit, each with its limit."""
    return [(lengths[key][indices].astype(numpy.int64), most) for key, most in _by_key(lengths, limit).items()]


def _by_key(lengths: Mapping[str, Array], limit: Limit) -> dict[str, int]:
    """The limit of every data key that has one."""
    if limit is None:
        return {}
    by_key = limit if isinstance(limit, Mapping) else dict.fromkeys(lengths, limit)
    return {key: most for key, most in by_key.items() if key in lengths}


def _caps(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> Array:
    """The most sequences a batch may have if this one is its longest, over all data keys: one column instead of several.

    "The longest times the number exceeds the limit in some key" is the same as "the number exceeds the smallest cap".
    """
    caps = numpy.full(len(indices), limits.max_seqs or NO_LIMIT, dtype=numpy.int64)
    for column, limit in _columns(lengths, indices, limits.batch_size):
        here = numpy.full(len(indices), NO_LIMIT, dtype=numpy.int64)  # for sequences without frames
        numpy.floor_divide(limit, column, out=here, where=column > 0)
        numpy.minimum(caps, here, out=caps)
    return caps


def _ends(lengths: Mapping[str, Array], indices: Array, limit: Limit) -> list[int]:
    """For every sequence, the end of the longest run that starts with it and whose frames add up to at most the limit."""
    if limit is None:
        return [len(indices)] * len(indices)
    ends = numpy.full(len(indices), len(indices), dtype=numpy.int64)
    for column, most in _columns(lengths, indices, limit):
        sums = numpy.concatenate([[0], numpy.cumsum(column)])
        numpy.minimum(ends, numpy.searchsorted(sums, sums[:-1] + most, side="right") - 1, out=ends)
    result: list[int] = ends.tolist()
    return result


def _starts(caps: list[int], ends: list[int]) -> list[int]:
    """Where batches begin, if none may be longer than the smallest of its caps or reach beyond the end of its first sequence."""
    starts = []
    count = lowest = end = 0  # as if a full batch had just ended
    for i, cap in enumerate(caps):
        if cap < lowest:
            lowest = cap
        if count >= lowest or i >= end:
            starts.append(i)
            count = 0
            lowest = cap
            end = ends[i]
        count += 1
    return starts


def _starts_with_padding(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> list[int]:
    """As `_starts`, with a limit on padded minus real frames: tracks the longest sequence and the sum for each data key."""
    caps = _caps(lengths, indices, limits).tolist()
    ends = _ends(lengths, indices, limits.packed_batch_size)
    columns = _columns(lengths, indices, limits.max_pad_size)
    padding_limits = [limit for _, limit in columns]
    starts = []
    count = lowest = end = 0
    longest = [0] * len(columns)
    total = [0] * len(columns)
    rows = zip(*(column.tolist() for column, _ in columns), strict=True) if columns else ([()] * len(caps))
    for i, (cap, row) in enumerate(zip(caps, rows, strict=True)):
        if cap < lowest:
            lowest = cap
        close = count >= lowest or i >= end
        if not close:
            for column, length in enumerate(row):
                most = longest[column] = max(longest[column], length)
                total[column] += length
                close |= most * (count + 1) - total[column] > padding_limits[column]
        if close:
            starts.append(i)
            count = 0
            lowest = cap
            end = ends[i]
            longest, total = list(row), list(row)
        count += 1
    return starts


def shuffled(num_batches: int, generator: numpy.random.RandomState) -> Array:
    """The batches in random order, int64 of shape (num_batches,)."""
    return generator.permutation(num_batches).astype(numpy.int64, copy=False)


def grouped_by_cost(costs: Array, group: int, generator: numpy.random.RandomState) -> Array:
    """The batches in groups of similar cost; the groups in random order, the costs within a group ascending.

    Batches i * group to (i + 1) * group - 1 of the result are neighbours when sorted by cost. So the ranks get batches of similar
    cost in every step, if their number divides `group`. If `group` does not divide the number of batches, the remainder, which is
    taken out of the sorted batches at a random position, comes last.

    Args:
        costs: of every batch; shape (num_batches,), or (num_batches, n) where later columns break ties.

    Returns:
        int64 indices of shape (num_batches,), every batch once.
    """
    columns = costs if costs.ndim == 2 else costs[:, None]
    by_cost = numpy.lexsort(columns.T[::-1])
    num_groups, rest = divmod(len(by_cost), group)
    cut = int(generator.randint(num_groups + 1)) * group
    grouped = numpy.concatenate([by_cost[:cut], by_cost[cut + rest :]]).reshape(num_groups, group)
    in_groups = grouped[generator.permutation(num_groups)].reshape(-1)
    return numpy.concatenate([in_groups, by_cost[cut : cut + rest]]).astype(numpy.int64, copy=False)


def rearranged(order: Array, bounds: Array, batches: Array) -> tuple[Array, Array]:
    """`order` and `bounds` of a plan with its batches in another order.

    Args:
        batches: the indices of the batches in the new order; shape (number of batches,).
    """
    counts = numpy.diff(bounds)[batches]
    edges = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64, copy=False)
    places = numpy.repeat(bounds[:-1][batches] - edges[:-1], counts) + numpy.arange(edges[-1])
    return order[places], edges
