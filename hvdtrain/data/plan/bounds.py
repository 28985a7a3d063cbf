"""The bounds of batches under the limits of the config, and the order of batches. RETURNN's rules, vectorized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy

from hvdtrain.data.plan.batch_keys import Limit, Limits
from hvdtrain.data.types import Array

NO_LIMIT = 2**62

SEQUENCES_AT_ONCE = 2**18
"""How many sequences are converted to Python numbers at once: a list takes up to ten times the memory of an array."""


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
        starts = _starts_with_padding(lengths, indices, limits)
    elif limits.batch_size is None and limits.packed_batch_size is None:
        starts = [numpy.arange(0, size, limits.max_seqs or max(1, size))]
    else:
        starts = _starts(lengths, indices, limits)
    return numpy.concatenate([*starts, [size]]).astype(numpy.int64, copy=False)


def count_too_long(lengths: Mapping[str, Array], limits: Limits) -> int:
    """The number of sequences that exceed `batch_size` or `packed_batch_size` by themselves."""
    is_too_long = numpy.zeros(len(next(iter(lengths.values()))), dtype=bool)
    for limit in (limits.batch_size, limits.packed_batch_size):
        for key, most in _by_key(lengths, limit).items():
            is_too_long |= lengths[key] > most
    return int(is_too_long.sum())


def _blocks(indices: Array) -> Iterator[tuple[int, Array]]:
    """The place of the first of every SEQUENCES_AT_ONCE sequences, and their indices."""
    for first in range(0, len(indices), SEQUENCES_AT_ONCE):
        yield first, indices[first : first + SEQUENCES_AT_ONCE]


def _columns(lengths: Mapping[str, Array], indices: Array, limit: Limit) -> list[tuple[Array, int]]:
    """The lengths in order, int64, for every data key that has the limit, each with its limit."""
    return [(lengths[key][indices].astype(numpy.int64), most) for key, most in _by_key(lengths, limit).items()]


def _by_key(lengths: Mapping[str, Array], limit: Limit) -> dict[str, int]:
    if limit is None:
        return {}
    by_key = limit if isinstance(limit, Mapping) else dict.fromkeys(lengths, limit)
    return {key: most for key, most in by_key.items() if key in lengths}


def _caps(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> Array:
    """The most sequences of a batch in which this one is the longest, over all data keys: one column instead of several.

    "The longest times the number exceeds the limit in some key" is the same as "the number exceeds the smallest cap".
    """
    caps = numpy.full(len(indices), limits.max_seqs or NO_LIMIT, dtype=numpy.int64)
    for column, limit in _columns(lengths, indices, limits.batch_size):
        bounds = numpy.full(len(indices), NO_LIMIT, dtype=numpy.int64)  # for sequences without frames
        numpy.floor_divide(limit, column, out=bounds, where=column > 0)
        numpy.minimum(caps, bounds, out=caps)
    return caps


def _ends(lengths: Mapping[str, Array], indices: Array, limit: Limit) -> Array:
    """For every sequence, the end of the longest run that starts with it and whose frames add up to at most the limit."""
    size = len(indices)
    if limit is None:
        return numpy.broadcast_to(size, size)
    ends = numpy.full(size, size, dtype=numpy.int64)
    for key, most in _by_key(lengths, limit).items():
        sums = numpy.zeros(size + 1, dtype=numpy.int64)
        sums[1:] = lengths[key][indices]
        numpy.cumsum(sums, out=sums)
        for first in range(0, size, SEQUENCES_AT_ONCE):
            block = slice(first, min(first + SEQUENCES_AT_ONCE, size))
            ends[block] = numpy.minimum(ends[block], numpy.searchsorted(sums, sums[block] + most, side="right") - 1)
    return ends


def _starts(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> list[Array]:
    """Where batches begin, if none may be longer than the smallest of its caps or reach beyond the end of its first sequence."""
    ends = _ends(lengths, indices, limits.packed_batch_size)
    starts_by_block = []
    start = close = 0  # of the current batch: its first sequence, and the one before which it must end
    for first, block in _blocks(indices):
        starts = []
        for i, cap in enumerate(_caps(lengths, block, limits).tolist(), first):
            if start + cap < close:
                close = start + cap
            if i >= close:
                starts.append(i)
                start = i
                close = min(i + cap, int(ends[i]))
        starts_by_block.append(numpy.array(starts, dtype=numpy.int64))
    return starts_by_block


def _starts_with_padding(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> list[Array]:
    """As `_starts`, with a limit on padded minus real frames: tracks the longest sequence and the sum for each data key."""
    ends = _ends(lengths, indices, limits.packed_batch_size)
    padding_limits = list(_by_key(lengths, limits.max_pad_size).values())
    starts_by_block = []
    start = close = 0
    longest = [0] * len(padding_limits)
    total = [0] * len(padding_limits)
    for first, block in _blocks(indices):
        caps = _caps(lengths, block, limits).tolist()
        columns = [column.tolist() for column, _ in _columns(lengths, block, limits.max_pad_size)]
        starts = []
        for i, (cap, *row) in enumerate(zip(caps, *columns, strict=True), first):
            if start + cap < close:
                close = start + cap
            full = i >= close
            if not full:
                for column, length in enumerate(row):
                    most = longest[column] = max(longest[column], length)
                    total[column] += length
                    full |= most * (i + 1 - start) - total[column] > padding_limits[column]
            if full:
                starts.append(i)
                start = i
                close = min(i + cap, int(ends[i]))
                longest = row
                total = row.copy()
        starts_by_block.append(numpy.array(starts, dtype=numpy.int64))
    return starts_by_block


def random_order(num_batches: int, generator: numpy.random.RandomState, window: int = 0) -> Array:
    """The batches in random order, int64 of shape (num_batches,).

    Args:
        window: shuffle this many consecutive batches, then the next ones; 0: all together.
    """
    if not window:
        return generator.permutation(num_batches).astype(numpy.int64, copy=False)
    starts = range(0, num_batches, window)
    parts = [start + generator.permutation(min(window, num_batches - start)) for start in starts]
    return numpy.concatenate([numpy.zeros(0, dtype=numpy.int64), *parts]).astype(numpy.int64, copy=False)


def group_by_cost(costs: Array, group: int, generator: numpy.random.RandomState) -> Array:
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
    group = min(group, len(by_cost) + 1)  # then there is no group, whose size would be too much for an array
    num_groups, num_left = divmod(len(by_cost), group)
    split = int(generator.randint(num_groups + 1)) * group
    grouped = numpy.concatenate([by_cost[:split], by_cost[split + num_left :]]).reshape(num_groups, group)
    in_groups = grouped[generator.permutation(num_groups)].reshape(-1)
    return numpy.concatenate([in_groups, by_cost[split : split + num_left]]).astype(numpy.int64, copy=False)


def rearrange(order: Array, bounds: Array, batches: Array) -> tuple[Array, Array]:
    """`order` and `bounds` of a plan with its batches in another order.

    Args:
        batches: the indices of the batches in the new order; shape (number of batches,).
    """
    counts = numpy.diff(bounds)[batches]
    edges = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64, copy=False)
    new = numpy.empty((edges[-1], *order.shape[1:]), dtype=order.dtype)
    for some in blocks_of(edges):
        here = slice(edges[some.start], edges[some.stop])
        moved = numpy.repeat(bounds[:-1][batches[some]] - edges[some], counts[some])  # the distance that every sequence moves
        new[here] = order[moved + numpy.arange(here.start, here.stop)]
    return new, edges


def blocks_of(bounds: Array) -> Iterator[slice]:
    """Slices of a plan's batches, in order, of about SEQUENCES_AT_ONCE, so that arrays computed from them stay small."""
    cuts = numpy.searchsorted(bounds, numpy.arange(SEQUENCES_AT_ONCE, bounds[-1], SEQUENCES_AT_ONCE))
    edges = numpy.unique([0, *cuts, len(bounds) - 1]).tolist()
    return map(slice, edges[:-1], edges[1:])
