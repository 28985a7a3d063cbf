"""The plan of an epoch: which sequences form which batch, and which rank gets which batch.

Every rank computes the whole plan from the lengths, without reading data, and takes its share. So each rank knows in advance
how many steps there are and what every rank does in each of them: no messages are exchanged, no rank waits for another, nothing
is dropped.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, not_negative, positive
from hvdtrain.data.plan.bounds import BLOCK, Limits, blocks_of, bounds, grouped_by_cost, rearranged, shuffled
from hvdtrain.data.plan.chunks import Chunks, select_by_length
from hvdtrain.data.plan.order import OrderKeys, called, order, order_in_windows, part_of, seed_of
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

Size = int | dict[str, int] | Callable[..., Any] | None
Frames = int | dict[str, int] | None

positive_or_unlimited = Rule("a positive number, or -1 for no limit", lambda value: value > 0 or value == -1)


@dataclass(frozen=True, kw_only=True)
class BatchKeys(Section):
    """How sequences are gathered into batches. Sizes are per rank."""

    batch_size: Size = key(
        None,
        "maximal number of padded frames in a rank's batch (longest sequence times number of sequences), for every "
        "data key or by key, or a "
        "function {form} that returns it; None: no limit",
        positive,
        form="*, epoch, **_",
    )
    batch_size_train: Size = key(None, "batch_size in training, if it differs", positive, form="*, epoch, **_")
    batch_size_dev: Size = key(None, "batch_size in evaluation, if it differs", positive, form="*, epoch, **_")
    max_seqs: int | Callable[..., Any] | None = key(
        None,
        "maximal number of sequences in a rank's batch, or a function {form} that returns it; None or -1: no limit",
        positive_or_unlimited,
        form="*, epoch, **_",
    )
    max_seqs_train: int | Callable[..., Any] | None = key(
        None, "max_seqs in training, if it differs", positive_or_unlimited, form="*, epoch, **_"
    )
    max_seqs_dev: int | Callable[..., Any] | None = key(
        None, "max_seqs in evaluation, if it differs", positive_or_unlimited, form="*, epoch, **_"
    )
    batch_size_total: int | dict[str, int] | None = key(
        None,
        "batch_size for the batches of all ranks together, as in ESPnet2: the batch_size of a rank is this divided by "
        "the number of ranks",
        positive,
    )
    max_seqs_total: int | None = key(None, "max_seqs for the batches of all ranks together, in the same way", positive)
    packed_batch_size: Frames = key(
        None, "maximal number of frames in a rank's batch without the padding, for every data key or by key", positive
    )
    max_pad_size: Frames = key(
        None,
        "maximal number of frames of padding in a rank's batch (padded minus real frames), for every data key or by key",
        not_negative,
    )
    max_seq_length: Frames = key(
        None,
        "drop sequences with more frames in any data key, or by key, in training and evaluation, before they are cut "
        "into chunks; "
        "None or 0: no limit",
        not_negative,
    )
    min_seq_length: Frames = key(None, "drop sequences with fewer frames, like max_seq_length", not_negative)
    shuffle_batches: bool = key(
        False, "train on the batches of an epoch in random order, from the same seed as the order of the sequences"
    )
    online_shuffle_batches: int | dict[str, int] | None = key(
        None,
        "RETURNN's key: train on N batches after the other in random order, then on the next N, so that batches stay near their "
        "place in the order of the sequences; a number, or {'buffer_size': N}",
        positive,
    )
    balance_ranks: int = key(
        0,
        "give the ranks batches of similar size in every step: the batches of an epoch come in groups of this many of "
        "similar size, the "
        "groups in random order; set it to the number of ranks or a multiple of it; 0: off",
        not_negative,
    )

    def problems(self, others: Sections = ALONE) -> list[str]:
        for total, own in (("batch_size_total", "batch_size"), ("max_seqs_total", "max_seqs")):
            if getattr(self, total) is not None and (getattr(self, own) is not None or getattr(self, f"{own}_train") is not None):
                return [f"{total}: expected either {total} (of all ranks) or {own} (of each rank), got both"]
        if not self.of_training().has_limit and self.batch_size_total is None and self.max_seqs_total is None:
            return ["batch_size: expected batch_size or max_seqs (one of them at least), got neither"]
        if not self.of_evaluation().has_limit and self.batch_size_total is None and self.max_seqs_total is None:
            return ["batch_size_dev: expected batch_size_dev or max_seqs_dev, where training has keys of its own, got neither"]
        found = []
        if isinstance(self.online_shuffle_batches, dict) and list(self.online_shuffle_batches) != ["buffer_size"]:
            found.append(f"online_shuffle_batches: expected a number or {{'buffer_size': N}}, got {self.online_shuffle_batches}")
        found += _problems_by_key("online_shuffle_batches", self.online_shuffle_batches, "a positive integer", 1)
        if self.shuffle_window and (self.shuffle_batches or self.balance_ranks):
            other = "shuffle_batches" if self.shuffle_batches else "balance_ranks"
            found.append(f"online_shuffle_batches: expected either it or {other}, which order all batches of an epoch, got both")
        for name in ("batch_size", "batch_size_train", "batch_size_dev", "batch_size_total", "packed_batch_size"):
            found += _problems_by_key(name, getattr(self, name), "a positive integer", 1)
        for name in ("max_pad_size", "max_seq_length", "min_seq_length"):
            found += _problems_by_key(name, getattr(self, name), "zero or a positive integer", 0)
        return found

    @property
    def shuffle_window(self) -> int:
        """The number of consecutive batches that `online_shuffle_batches` puts in random order; 0: it is off."""
        given = self.online_shuffle_batches
        return (given.get("buffer_size", 0) if isinstance(given, dict) else given) or 0

    @property
    def has_limit(self) -> bool:
        """Whether a key limits the size of a batch."""
        return self.batch_size is not None or self.max_seqs not in (None, -1) or self.packed_batch_size is not None

    def of_each_of(self, ranks: int) -> BatchKeys:
        """The keys of each of several ranks. Raises: DataError, if there is less than one sequence for each."""
        if self.max_seqs_total is not None and self.max_seqs_total < ranks:
            raise DataError(
                f"max_seqs_total: expected at least one sequence for each of {ranks} ranks, got {self.max_seqs_total}"
            )
        total = self.batch_size_total
        if isinstance(total, dict):
            total = {name: max(1, size // ranks) for name, size in total.items()}
        return replace(
            self,
            batch_size=self.batch_size if total is None else total if isinstance(total, dict) else max(1, total // ranks),
            max_seqs=self.max_seqs if self.max_seqs_total is None else self.max_seqs_total // ranks,
            batch_size_total=None,
            max_seqs_total=None,
        )

    def of_training(self) -> BatchKeys:
        """The keys that apply in training."""
        return self._with(self.batch_size_train, self.max_seqs_train)

    def of_evaluation(self) -> BatchKeys:
        """The keys that apply in evaluation, where batches stay in order."""
        own = self._with(self.batch_size_dev, self.max_seqs_dev)
        return replace(own, shuffle_batches=False, balance_ranks=0, online_shuffle_batches=None)

    def limits(self, epoch: int) -> Limits:
        """The limits of the batches of an epoch. Raises: DataError, if a function of the config returns no size."""
        batch_size = _called("batch_size", self.batch_size, epoch)
        max_seqs = _called("max_seqs", self.max_seqs, epoch)
        return Limits(batch_size, None if max_seqs == -1 else max_seqs, self.packed_batch_size, self.max_pad_size)

    def _with(self, batch_size: Size, max_seqs: int | Callable[..., Any] | None) -> BatchKeys:
        return replace(
            self,
            batch_size=self.batch_size if batch_size is None else batch_size,
            max_seqs=self.max_seqs if max_seqs is None else max_seqs,
        )


def _problems_by_key(name: str, value: object, rule: str, least: int) -> list[str]:
    if isinstance(value, dict) and any(not isinstance(size, int) or size < least for size in value.values()):
        return [f"{name}: expected {rule} for every data key, got {value}"]
    return []


def _called(name: str, value: Any, epoch: int) -> Any:
    """A size, or what the function of the config returns for an epoch. Raises: DataError."""
    if not callable(value):
        return value
    size = called(name, value, epoch)
    members = list(size.values()) if isinstance(size, dict) and name == "batch_size" else [size]
    numbers = [isinstance(member, (int, numpy.integer)) and not isinstance(member, bool) for member in members]
    if size is not None and not (all(numbers) and all(member > 0 or (name, member) == ("max_seqs", -1) for member in members)):
        rule = "a positive integer, a dict of them or None" if name == "batch_size" else "a positive integer, -1 or None"
        raise DataError(f"{name}: expected the function to return {rule}, got {size!r} for epoch {epoch}")
    if isinstance(size, dict):
        return {key: int(member) for key, member in size.items()}
    return None if size is None else int(size)


@dataclass(frozen=True)
class Plan:
    """An epoch's batches: batch i is `order[bounds[i]:bounds[i + 1]]`.

    Attributes:
        order: indices of sequences, int64 (int32 in a plan that ranks share), shape (number of sequences in the epoch,); indices
            of chunks, if sequences are cut.
        bounds: int64, shape (number of batches + 1,).
    """

    order: Array
    bounds: Array

    @property
    def num_batches(self) -> int:
        return len(self.bounds) - 1

    def batch(self, index: int) -> Array:
        """The indices of one batch's sequences, int64, in an array of their own."""
        return self.order[self.bounds[index] : self.bounds[index + 1]].astype(numpy.int64)

    def share(self, rank: int, size: int, start: int = 0) -> Share:
        """The batches of one rank, without the first `start` ones, which are done: of the others, batch i goes to rank
        i % size."""
        return Share(self, range(start + rank, self.num_batches, size))

    def fingerprint(self) -> int:
        """A checksum: the same on two ranks if they have the same plan."""
        found = 0
        for some in (self.order[i : i + BLOCK] for i in range(0, len(self.order), BLOCK)):
            found = crc32(some.astype(numpy.int64, copy=False), found)
        return crc32(self.bounds, found)

    def longest(self, lengths: Mapping[str, Array]) -> dict[str, Array]:
        """By data key, number of frames of the longest sequence of every batch, int64 of shape (number of batches,)."""
        longest = {name: numpy.zeros(self.num_batches, dtype=numpy.int64) for name in lengths}
        for some in blocks_of(self.bounds):
            edges = self.bounds[some.start : some.stop + 1]
            indices = self.order[edges[0] : edges[-1]]
            for name, column in lengths.items():
                longest[name][some] = numpy.maximum.reduceat(column[indices], edges[:-1] - edges[0])
        return longest

    def padded(self, lengths: Mapping[str, Array]) -> dict[str, Array]:
        """By data key, number of frames of every batch with its padding, int64 of shape (number of batches,)."""
        counts = numpy.diff(self.bounds)
        return {name: longest * counts for name, longest in self.longest(lengths).items()}

    def padding(self, lengths: Mapping[str, Array]) -> dict[str, float]:
        """By data key, the fraction of the epoch's padded frames that is padding."""
        result = {}
        for name, frames in self.padded(lengths).items():
            total = int(frames.sum())
            result[name] = 1 - self._frames(lengths[name]) / total if total else 0.0
        return result

    def _frames(self, lengths: Array) -> int:
        """The number of frames of all sequences of the epoch."""
        return sum(int(lengths[self.order[i : i + BLOCK]].sum(dtype=numpy.int64)) for i in range(0, len(self.order), BLOCK))


class Share(Sequence[Array]):
    """Some batches of a plan, such as those of a rank. Each is made when it is asked for: a list of them would take more memory
    than the plan."""

    def __init__(self, plan: Plan, numbers: range) -> None:
        self._plan = plan
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Share: ...

    def __getitem__(self, index: int | slice) -> Array | Share:
        found = self._numbers[index]
        return Share(self._plan, found) if isinstance(found, range) else self._plan.batch(found)


def crc32(values: Array, before: int = 0) -> int:
    """The checksum of an array's bytes after those that `before` is the checksum of."""
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
) -> Plan:
    """The plan of an epoch (counted from 1): a pure function of its arguments, the same on every rank.

    Args:
        lengths: by data key, number of frames of every sequence. Sequences are sorted by 'data', or else by the first key.
        subset: indices of the sequences to use; None: all of them.
        file_bounds: as of `Dataset.file_bounds`.
        chunks: the chunks of all sequences, if they are cut; the plan then consists of chunks.
        window: as of `Dataset`, without `subset`.

    Raises:
        DataError: none of the epoch's sequences is left, or the order keys do not fit the data.
    """
    by = lengths["data"] if "data" in lengths else next(iter(lengths.values()))
    if window is None:
        ordered = order(by, order_keys, epoch, subset, file_bounds)
    else:
        ordered = order_in_windows(by, order_keys, epoch, window)
    indices = select_by_length(lengths, ordered, batch_keys.min_seq_length, batch_keys.max_seq_length)
    if chunks is not None:
        indices = chunks.of(indices)
        lengths = chunks.lengths
    if len(ordered) and not len(indices):
        raise DataError(
            f"epoch {epoch}: expected at least one of its {len(ordered)} sequences to be left, got none that min_seq_length, "
            "max_seq_length and min_chunk_size allow"
        )
    made = Plan(indices, bounds(lengths, indices, batch_keys.limits(epoch)))
    if not batch_keys.shuffle_batches and not batch_keys.balance_ranks and not batch_keys.shuffle_window:
        return made
    generator = numpy.random.RandomState([seed_of(order_keys, epoch), part_of(order_keys, epoch)])
    if batch_keys.balance_ranks:
        batches = grouped_by_cost(_costs(made, lengths), batch_keys.balance_ranks, generator)
    else:
        batches = shuffled(made.num_batches, generator, batch_keys.shuffle_window)
    return Plan(*rearranged(made.order, made.bounds, batches))


def _costs(made: Plan, lengths: Mapping[str, Array]) -> Array:
    """The cost of batches: padded frames, then the longest sequence, summed over data keys; shape (number of batches, 2)."""
    longest = made.longest(lengths)
    counts = numpy.diff(made.bounds)
    total = numpy.sum(list(longest.values()), axis=0)
    return numpy.stack([total * counts, total], axis=1)
