"""The plan of an epoch: which sequences form which batch, and which rank gets which batch.

The plan follows from the lengths, without reading data, so that every rank can make the whole of it and take its share: it knows
in advance how many steps there are and what every rank does in each of them. The ranks exchange only a checksum of the inputs
(`training/agreement.py`), and only limits of the config leave out sequences.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import numpy

from hvdtrain.data.plan.batch_keys import NO_LIMIT, BatchKeys
from hvdtrain.data.plan.bounds import SEQUENCES_AT_ONCE, blocks_of, bounds, group_by_cost, random_order, rearrange
from hvdtrain.data.plan.chunks import Chunks
from hvdtrain.data.plan.costs import count_in_cost, sorting_lengths
from hvdtrain.data.plan.frames import cut_frames, frames_of
from hvdtrain.data.plan.mix import Mix
from hvdtrain.data.plan.order import order, order_in_windows
from hvdtrain.data.plan.order_keys import GivenOrder, OrderKeys, method_of, part_of, seed_of
from hvdtrain.data.plan.selection import select_by_length
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError


@dataclass(frozen=True)
class Plan:
    """An epoch's batches: batch i is `order[bounds[i]:bounds[i + 1]]`.

    Attributes:
        order: indices of sequences, int64 (int32 in a plan that ranks share), shape (number of sequences in the epoch,); indices
            of chunks, if sequences are cut. For batches of frames, pieces of shape (number of pieces, 3), see `frames.py`.
        bounds: int64, shape (number of batches + 1,).
    """

    order: Array
    bounds: Array

    @property
    def num_batches(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: int) -> Array:
        """The indices of one batch's sequences, or its pieces: a new array of int64."""
        return self.order[self.bounds[index] : self.bounds[index + 1]].astype(numpy.int64)

    def rank_batches(self, rank: int, size: int, start: int = 0) -> RankBatches:
        """The batches of one rank, without the first `start` ones of the plan, which are done: of the rest, batch i goes to rank
        i % size."""
        return RankBatches(self, range(start + rank, self.num_batches, size))

    @cached_property
    def fingerprint(self) -> int:
        """A checksum, which is the same on two ranks if they have the same plan."""
        checksum = 0
        for block in (self.order[i : i + SEQUENCES_AT_ONCE] for i in range(0, len(self.order), SEQUENCES_AT_ONCE)):
            checksum = crc32(block.astype(numpy.int64, copy=False), checksum)
        return crc32(self.bounds, checksum)

    @cached_property
    def draws(self) -> Array | None:
        """For every element of `order`, how often the epoch has had it (of a piece: its sequence) before, int64 of shape
        (elements,); None: each is there once. Random data is drawn anew each time."""
        elements = self.order[:, 0] if self.cuts_frames else self.order
        is_new = self.order[:, 1] == 0 if self.cuts_frames else numpy.ones(len(elements), dtype=bool)
        if not len(elements) or numpy.bincount(elements[is_new]).max(initial=0) <= 1:
            return None
        by_index = numpy.argsort(elements, kind="stable")
        counts = numpy.cumsum(is_new[by_index])
        ordered = elements[by_index]
        begins = numpy.append(True, ordered[1:] != ordered[:-1])
        draws = numpy.empty(len(by_index), dtype=numpy.int64)
        draws[by_index] = counts - numpy.maximum.accumulate(numpy.where(begins, counts, 0))
        return draws

    @property
    def cuts_frames(self) -> bool:
        """Whether its batches are joined pieces of sequences."""
        return self.order.ndim == 2

    @property
    def done(self) -> Array:
        """How much of the epoch precedes every batch, and then the whole, int64 of shape (number of batches + 1,): the number of
        sequences or chunks, or of frames if batches are cut anywhere."""
        return numpy.append(0, numpy.cumsum(frames_of(self.order)))[self.bounds] if self.cuts_frames else self.bounds

    def indices_between(self, start: int, stop: int) -> Array:
        """The part of `order` that is in the batches from `start` up to `stop` (exclusive). Both may lie beyond the end, as does
        the position of a rank that has fewer batches than another, where each has its own plan."""
        first, last = self.bounds[[min(start, self.num_batches), min(stop, self.num_batches)]]
        return self.order[first:last]

    def with_batches(self, batches: Array) -> Plan:
        """A plan of these batches, in this order; they may repeat."""
        return Plan(*rearrange(self.order, self.bounds, batches))

    def longest(self, lengths: Mapping[str, Array]) -> dict[str, Array]:
        """By data key, number of frames of the longest row of every batch, int64 of shape (number of batches,)."""
        if self.cuts_frames:
            return dict.fromkeys(lengths, numpy.diff(self.done))
        longest = {name: numpy.zeros(self.num_batches, dtype=numpy.int64) for name in lengths}
        for some in blocks_of(self.bounds):
            edges = self.bounds[some.start : some.stop + 1]
            indices = self.order[edges[0] : edges[-1]]
            for name, column in lengths.items():
                longest[name][some] = numpy.maximum.reduceat(column[indices], edges[:-1] - edges[0])
        return longest

    def padded(self, lengths: Mapping[str, Array]) -> dict[str, Array]:
        """By data key, number of frames of every batch with its padding, int64 of shape (number of batches,)."""
        rows = 1 if self.cuts_frames else numpy.diff(self.bounds)
        return {name: longest * rows for name, longest in self.longest(lengths).items()}

    def padding(self, lengths: Mapping[str, Array]) -> dict[str, float]:
        """By data key, the fraction of the epoch's padded frames that is padding."""
        result = {}
        for name, frames in self.padded(lengths).items():
            total = int(frames.sum())
            result[name] = 1 - self.num_frames(lengths[name], 0, self.num_batches) / total if total else 0.0
        return result

    def num_frames(self, lengths: Array, start: int, stop: int) -> int:
        """The number of frames in the batches from `start` up to `stop` (exclusive), without padding.

        Args:
            lengths: number of frames of every sequence, or chunk.
        """
        indices = self.indices_between(start, stop)
        blocks = (indices[i : i + SEQUENCES_AT_ONCE] for i in range(0, len(indices), SEQUENCES_AT_ONCE))
        count = frames_of if self.cuts_frames else lengths.__getitem__
        return sum(int(count(block).sum(dtype=numpy.int64)) for block in blocks)


class RankBatches(Sequence[Array]):
    """Some batches of a plan, such as those of a rank. Each is made on access: a list would take more memory than the plan."""

    def __init__(self, plan: Plan, numbers: range) -> None:
        self._plan = plan
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def draws(self, index: int) -> Array | None:
        """`Plan.draws` of the elements of a batch."""
        draws = self._plan.draws
        bounds = self._plan.bounds
        number = self._numbers[index]
        return None if draws is None else draws[bounds[number] : bounds[number + 1]]

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> RankBatches: ...

    def __getitem__(self, index: int | slice) -> Array | RankBatches:
        number = self._numbers[index]
        return RankBatches(self._plan, number) if isinstance(number, range) else self._plan.batch(number)


def crc32(values: Array, before: int = 0) -> int:
    """The checksum of an array's bytes, continued from the checksum `before`."""
    return zlib.crc32(numpy.ascontiguousarray(values).data, before)


def plan(
    lengths: Mapping[str, Array],
    order_keys: OrderKeys,
    batch_keys: BatchKeys,
    epoch: int,
    *,
    subset: Array | None = None,
    file_bounds: Array | None = None,
    chunks: Chunks | None = None,
    window: int | None = None,
    mix: Mix | None = None,
    lengths_of_order: Mapping[str, Array] | None = None,
    max_batches: int | None = None,
) -> Plan:
    """The plan of an epoch (counted from 1): a pure function of its arguments, the same on every rank.

    Args:
        lengths: by data key, number of frames of every sequence. Sequences are sorted by 'data', or else by the first key.
        subset: indices of the sequences to use; None: all of them.
        file_bounds: as in `Dataset.file_bounds`.
        chunks: the chunks of all sequences, if they are cut; the plan then consists of chunks.
        window: as in `Dataset`; only without `subset`.
        mix: as in `Dataset`. Sequences of other lengths than allowed are then left out before the parts are mixed.
        lengths_of_order: the lengths by which sequences are ordered and, in a mix, left out; None: `lengths`.
        max_batches: of all ranks together; None: all.

    Raises:
        DataError: none of the epoch's sequences is left, the keys of the order or the cost do not fit the data, or nothing limits
            batches.
    """
    method = method_of(order_keys, epoch)
    if isinstance(method, GivenOrder) and method.bounds is not None:
        selections = {
            "an iterable": window is not None,
            "a MixingDataset": mix is not None,
            "chunking": chunks is not None,
            "seq_list_filter_file or sampling_sizes": subset is not None,
        }
        _check_given(method, lengths, order_keys, batch_keys, epoch, selections)
        planned = Plan(method.indices, method.bounds)
        times = lengths
    else:
        order_lengths = lengths if lengths_of_order is None else lengths_of_order
        sort_by = sorting_lengths(order_lengths)
        if mix is not None:
            in_use = numpy.arange(len(sort_by)) if subset is None else subset
            in_use = select_by_length(order_lengths, in_use, batch_keys.min_seq_length, batch_keys.max_seq_length)
            ordered = mix.order(sort_by, order_keys, epoch, in_use)
        elif window is None:
            ordered = order(sort_by, order_keys, epoch, subset, file_bounds)
        else:
            ordered = order_in_windows(sort_by, order_keys, epoch, window)
        indices = select_by_length(lengths, ordered, batch_keys.min_seq_length, batch_keys.max_seq_length)
        if chunks is not None:
            indices = chunks.numbers_of(indices)
            lengths = chunks.lengths
        if len(ordered) and not len(indices):
            raise DataError(
                f"epoch {epoch}: expected at least one of its {len(ordered)} sequences to be left, got none that min_seq_length, "
                "max_seq_length and min_chunk_size allow"
            )
        if callable(order_keys.seq_ordering) and not batch_keys.has_limit:
            raise DataError(f"{NO_LIMIT}, nor batches from seq_ordering")
        sizes, limits, times = count_in_cost(batch_keys, lengths, batch_keys.limits(epoch))
        planned = (
            Plan(*cut_frames(lengths, indices, limits))
            if batch_keys.frame_batches
            else Plan(indices, bounds(sizes, indices, limits))
        )
    if batch_keys.shuffle_batches or batch_keys.balance_ranks or batch_keys.shuffle_window:
        planned = _reorder(planned, times, order_keys, batch_keys, epoch)
    if max_batches is not None and max_batches < planned.num_batches:
        planned = Plan(planned.order[: planned.bounds[max_batches]], planned.bounds[: max_batches + 1])
    return _with_largest_first(planned, lengths, batch_keys.balance_ranks or 1) if batch_keys.largest_batches_first else planned


def _check_given(
    given: GivenOrder,
    lengths: Mapping[str, Array],
    order_keys: OrderKeys,
    batch_keys: BatchKeys,
    epoch: int,
    selections: Mapping[str, bool],
) -> None:
    """Check the batches that a function of the config has returned, as they are. Raises: DataError.

    Args:
        selections: by name, whether something else selects or orders the sequences.
    """
    limits = batch_keys.limits(epoch)
    uses = {
        "max_seqs or max_seqs_total (max_seqs_dev limits evaluation)": limits.max_seqs is not None,
        "batch_size, packed_batch_size or max_pad_size": limits
        != replace(limits, batch_size=None, packed_batch_size=None, max_pad_size=None),
        "max_seq_length or min_seq_length": bool(batch_keys.max_seq_length or batch_keys.min_seq_length),
        "frame_batches": batch_keys.frame_batches,
        "partition_epoch": order_keys.partition_epoch > 1,
        "repeat_epoch": order_keys.repeat_epoch > 1,
        **selections,
    }
    for name in [name for name, is_used in uses.items() if is_used]:
        raise DataError(f"seq_ordering: expected no {name} with batches that a function or a batch_sampler makes, got both")
    size = len(next(iter(lengths.values())))
    if given.indices.min() < 0 or given.indices.max() >= size:
        raise DataError(
            f"seq_ordering: expected batches of indices from 0 to {size - 1} for epoch {epoch}, got some from "
            f"{given.indices.min()} to {given.indices.max()}"
        )


def _reorder(plan: Plan, sizes: Mapping[str, Array], order_keys: OrderKeys, batch_keys: BatchKeys, epoch: int) -> Plan:
    """The plan with its batches in random order.

    Args:
        sizes: by data key, of sequences: a measure of the time that they take.
    """
    generator = numpy.random.RandomState([seed_of(order_keys, epoch), part_of(order_keys, epoch)])
    if batch_keys.balance_ranks:
        batches = group_by_cost(_costs(plan, sizes), batch_keys.balance_ranks, generator)
    else:
        batches = random_order(plan.num_batches, generator, batch_keys.shuffle_window)
    return plan.with_batches(batches)


FIRST = 16
"""How many of the largest batches come first, and of those with the longest sequences: one for each of so many ranks."""


def _with_largest_first(plan: Plan, lengths: Mapping[str, Array], group: int) -> Plan:
    """The plan with its largest batches first, and then those with the longest sequences.

    Args:
        group: the number of successive batches that stay together, as they are of similar size.
    """
    num_groups = plan.num_batches // group  # an incomplete group stays last
    if not num_groups:
        return plan
    in_groups, ungrouped = numpy.split(numpy.arange(plan.num_batches), [num_groups * group])
    costs = _costs(plan, lengths)[: len(in_groups)].reshape(num_groups, group, 2).max(axis=1)
    first: dict[int, None] = {}
    for column in costs.T:
        first |= dict.fromkeys(numpy.argsort(-column, kind="stable")[: -(-FIRST // group)].tolist())
    groups = [*first, *(number for number in range(num_groups) if number not in first)]
    batches = numpy.concatenate([in_groups.reshape(num_groups, group)[groups].reshape(-1), ungrouped])
    return plan.with_batches(batches)


def _costs(plan: Plan, sizes: Mapping[str, Array]) -> Array:
    """The cost of batches: padded frames (or `batch_cost`), then the longest sequence, over data keys; shape (batches, 2)."""
    columns = plan.padded(sizes), plan.longest(sizes)
    return numpy.stack([numpy.sum(list(column.values()), axis=0) for column in columns], axis=1)
