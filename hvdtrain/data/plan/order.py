"""The order of an epoch's sequences: RETURNN's `seq_ordering` methods, bit for bit, and `random_blocks`.

Everything here is a pure function of the lengths, the settings and the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy

from hvdtrain.data.plan.order_keys import GivenOrder, Method, OrderKeys, method_of, part_of, seed_of
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

BLOCKS_TOGETHER = 16
"""The number of blocks whose sequences `random_blocks` shuffles together."""

WINDOW_STEP = 7919
"""The distance between the seeds of neighbouring windows."""


def order(lengths: Array, keys: OrderKeys, epoch: int, subset: Array | None = None, file_bounds: Array | None = None) -> Array:
    """The indices of the sequences of one epoch (counted from 1), in order.

    Args:
        lengths: number of frames of every sequence, by which the sorting methods sort; shape (num_sequences,).
        subset: indices of the sequences to use; None: all of them. With `seq_list_filter_file`, the others are left out of the
            epoch's part at last, as RETURNN does; else (`sampling_sizes`), these are ordered and cut as if there were no others.
        file_bounds: as in `Dataset.file_bounds`, for `partition_by`.

    Returns:
        int64 indices of shape (number of sequences in this epoch,).

    Raises:
        DataError: there are fewer sequences than parts to cut them into, or a function of the config returns an unknown order.
    """
    listed, subset = (None, subset) if keys.seq_list_filter_file is None else (subset, None)
    if subset is not None:
        lengths = lengths[subset]
    method = method_of(keys, epoch)
    seed = seed_of(keys, epoch)
    number = part_of(keys, epoch)
    if keys.partition_by == "files" and keys.partition_epoch > 1:
        bounds = numpy.array([0, len(lengths)]) if file_bounds is None else file_bounds
        which = numpy.searchsorted(bounds, numpy.arange(len(lengths)) if subset is None else subset, side="right") - 1
        generator = numpy.random.RandomState([seed, keys.partition_epoch]) if method.is_random else None
        places = part_of_files(lengths, which, keys.partition_epoch, number, generator)
        indices = places[order_all(lengths[places], method, seed)]
    else:
        indices = partition(order_all(lengths, method, seed), keys.partition_epoch, number)
    if subset is not None:
        indices = subset[indices].astype(numpy.int64, copy=False)
    if listed is not None:
        is_listed = numpy.zeros(len(lengths), dtype=bool)
        is_listed[listed] = True
        indices = indices[is_listed[indices]]
        if not len(indices):
            raise DataError(
                f"epoch {epoch}: expected at least one of its sequences in seq_list_filter_file, which is applied after "
                f"partition_epoch, got none of the {len(listed)} (fewer parts, or a dataset of these sequences only)"
            )
    return numpy.tile(indices, keys.repeat_epoch) if keys.repeat_epoch > 1 else indices


def order_in_windows(lengths: Array, keys: OrderKeys, epoch: int, window: int) -> Array:
    """The indices of the sequences of an epoch, each within its window of neighbours in order: as `order`, window by window.

    A random order differs from window to window.
    """
    parts = []
    for number, start in enumerate(range(0, len(lengths), window)):
        window_keys = replace(keys, random_seed_offset=keys.random_seed_offset + number * WINDOW_STEP)
        parts.append(start + order(lengths[start : start + window], window_keys, epoch))
    return numpy.concatenate(parts) if parts else numpy.zeros(0, dtype=numpy.int64)


def order_all(lengths: Array, method: Method, seed: int) -> Array:
    """The indices of all sequences in a method's order. Raises: DataError."""
    size = len(lengths)
    if isinstance(method, GivenOrder):
        if not numpy.array_equal(numpy.sort(method.indices), numpy.arange(size)):
            raise DataError(
                f"seq_ordering: expected the function to return each index from 0 to {size - 1} once, or a method, got "
                f"{len(method.indices)} indices that are not these"
            )
        return numpy.asarray(method.indices, dtype=numpy.int64)
    if size == 0:
        return numpy.zeros(0, dtype=numpy.int64)
    if method.name == "default_every_n" and (method.bins or 1) > size:
        raise DataError(
            f"seq_ordering: expected default_every_n:N with N up to {size}, the number of sequences, got "
            f"default_every_n:{method.bins}, which leaves none of them"
        )
    lengths = sorting_integers(lengths)
    generator = numpy.random.RandomState(seed)
    bins = num_bins(method, size)
    simple: dict[str, Callable[[], Array]] = {
        "default": lambda: numpy.arange(size),
        "reverse": lambda: numpy.arange(size)[::-1].copy(),
        "default_every_n": lambda: numpy.arange(size // bins * bins).reshape(bins, size // bins).T.reshape(-1),
        "sorted": lambda: numpy.argsort(lengths, kind="stable"),
        "sorted_reverse": lambda: numpy.argsort(~lengths, kind="stable"),
        "random": lambda: generator.permutation(size),
        "random_sample": lambda: generator.randint(0, size, size=size),
        "laplace": lambda: laplace(lengths, generator.permutation(size), bins),
        "random_blocks": lambda: random_blocks(size, generator, method.per_bin or 1),
        "sort_bin_shuffle": lambda: _sort_bin_shuffle(lengths, generator, bins, shuffle_within=False),
        "sort_bin_shuffle_x2": lambda: _sort_bin_shuffle(lengths, generator, bins, shuffle_within=True),
    }
    return simple[method.name]().astype(numpy.int64, copy=False)


def sorting_integers(lengths: Array) -> Array:
    """Lengths as integers that sort fast. `~lengths` sorts them the other way round.

    numpy sorts 16-bit integers by counting, in a fraction of the time that comparing takes.
    """
    if lengths.min() >= 0 and lengths.max() < 2**16:
        return lengths.astype(numpy.uint16)
    return lengths.astype(numpy.int64, copy=False)


def _bin_cuts(size: int, bins: int) -> list[int]:
    """Where RETURNN cuts a row of sequences into bins. numpy.array_split would make the first ones longer instead.

    >>> _bin_cuts(11, 4)
    [0, 2, 5, 8, 11]
    """
    return [i * size // bins for i in range(bins + 1)]


def num_bins(method: Method, size: int) -> int:
    """The number of bins of so many sequences."""
    return method.bins or (max(size // method.per_bin, 2) if method.per_bin else 2)


def laplace(lengths: Array, indices: Array, bins: int) -> Array:
    """A random order in bins, sorted in ascending and descending order in turn: lengths do not jump between neighbours."""
    cuts = _bin_cuts(len(lengths), bins)
    for i in range(bins):
        bin_indices = indices[cuts[i] : cuts[i + 1]]  # a view, which is sorted in place
        bin_lengths = lengths[bin_indices]
        bin_indices[:] = bin_indices[numpy.argsort(bin_lengths if i % 2 == 0 else ~bin_lengths, kind="stable")]
    return indices


def _sort_bin_shuffle(lengths: Array, generator: numpy.random.RandomState, bins: int, shuffle_within: bool) -> Array:
    """Sorted sequences, ties in random order, cut into bins that come in random order."""
    shuffled = generator.permutation(len(lengths))
    by_length = shuffled[numpy.argsort(lengths[shuffled], kind="stable")]
    cuts = _bin_cuts(len(lengths), bins)
    parts = []
    for i in generator.permutation(bins):
        bin_indices = by_length[cuts[i] : cuts[i + 1]].copy()
        if shuffle_within:
            generator.shuffle(bin_indices)
        parts.append(bin_indices)
    return numpy.concatenate(parts)


def random_blocks(size: int, generator: numpy.random.RandomState, per_block: int) -> Array:
    """Blocks of neighbours in random order; then the sequences of every BLOCKS_TOGETHER blocks are shuffled."""
    starts = numpy.arange(0, size, per_block)[generator.permutation(-(-size // per_block))]
    counts = numpy.minimum(per_block, size - starts)
    ends = numpy.cumsum(counts)
    in_blocks = numpy.repeat(starts - (ends - counts), counts) + numpy.arange(size)
    buffers = numpy.repeat(numpy.arange(len(starts)) // BLOCKS_TOGETHER, counts)
    return in_blocks[numpy.lexsort((generator.random_sample(size), buffers))]


def partition(indices: Array, count: int, which: int) -> Array:
    """One of `count` contiguous parts; the first ones are longer by one if their number is not divisible."""
    if count > max(1, len(indices)):
        raise DataError(f"partition_epoch: expected at most {len(indices)}, the number of sequences, got {count}")
    return numpy.array_split(indices, count)[which]


def part_of_files(lengths: Array, which: Array, count: int, number: int, generator: numpy.random.RandomState | None) -> Array:
    """The sequences of one of `count` parts, each of which consists of whole files; file after file, in the order of the files.

    The files are shuffled, or come in their own order without a generator, and are cut into parts of about the same number of
    frames and at least one file. Files without any sequence in use are ignored.

    Args:
        lengths: number of frames of every sequence in use.
        which: the file of every sequence.
        number: of the part, counted from 0.

    Returns:
        int64 positions in `lengths`.

    Raises:
        DataError: there are fewer files than parts.
    """
    used = numpy.unique(which)
    if count > len(used):
        raise DataError(
            f"partition_epoch: expected at most {len(used)}, the number of files (partition_by is 'files'), got {count}"
        )
    files = used if generator is None else generator.permutation(used)
    frames = numpy.bincount(which, weights=lengths)[files]
    cuts = _cuts(frames, count)
    chosen = files[cuts[number] : cuts[number + 1]]
    turn = numpy.full(int(used[-1]) + 1, -1, dtype=numpy.int64)
    turn[chosen] = numpy.arange(len(chosen))
    places = numpy.flatnonzero(turn[which] >= 0)
    return places[numpy.argsort(turn[which[places]], kind="stable")]


def _cuts(sizes: Array, count: int) -> Array:
    """Where to cut a row of items into contiguous parts of about the same total size, none of them empty; shape (count + 1,).

    >>> _cuts(numpy.array([1, 1, 1, 9, 1, 1]), 3).tolist(), _cuts(numpy.array([0, 0, 5]), 3).tolist()
    ([0, 3, 4, 6], [0, 1, 2, 3])
    """
    middles = numpy.cumsum(sizes) - sizes / 2
    wanted = sizes.sum() * numpy.arange(1, count) / count
    inner = numpy.arange(count - 1)
    cuts = numpy.maximum.accumulate(numpy.maximum(numpy.searchsorted(middles, wanted), 1) - inner) + inner
    cuts = numpy.minimum(cuts, len(sizes) - (count - 1) + inner)
    return numpy.concatenate([[0], cuts, [len(sizes)]]).astype(numpy.int64)
