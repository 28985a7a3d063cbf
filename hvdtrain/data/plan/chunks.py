"""The elements of an epoch: the selected sequences, or the chunks that they are cut into.

Sequences are selected by a list of tags, by the dataset's selection for an epoch, and by length. Chunks are parts of equal size,
which are then batched as if each were a sequence. The chunks of a dataset are numbered, sequence by sequence, so that a plan
refers to chunks as it does to sequences: by index.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import text_lines
from hvdtrain.data.plan.batch_keys import Limit
from hvdtrain.data.plan.chunk_keys import FRAMES_END, ChunkKeys, Context, Tail, limit_of, parse, parse_context
from hvdtrain.data.types import Array, Batch
from hvdtrain.data.views import PartsOfSequences
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
        listed += [first + place for place, tag in enumerate(tags) if tag in wanted]
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


@dataclass(frozen=True)
class Chunks:
    """All chunks of a dataset.

    Attributes:
        first: the index of the first chunk of every sequence, then the number of chunks; int64 of shape (num_sequences + 1,).
        sequences: the index of every chunk's sequence; int64 of shape (num_chunks,).
        numbers: the number of every chunk in its sequence, from 0; int64 of shape (num_chunks,).
        lengths: by data key, number of frames of every chunk; int32 of shape (num_chunks,).
        steps: by data key, number of frames between the starts of two chunks; without data keys that stay whole.
        context: the frames that every chunk has in addition, before and after it; None: there are none.
    """

    first: Array
    sequences: Array
    numbers: Array
    lengths: Mapping[str, Array]
    steps: Mapping[str, int]
    context: Context | None = None

    def numbers_of(self, sequences: Array) -> Array:
        """The chunks of some sequences, in order; for a sequence that occurs twice, its chunks come twice."""
        counts = self.first[sequences + 1] - self.first[sequences]
        ends = numpy.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return numpy.repeat(self.first[sequences] - (ends - counts), counts) + numpy.arange(total)


def make_chunks(lengths: Mapping[str, Array], keys: ChunkKeys) -> Chunks | None:
    """The chunks of all sequences, with their context; None if both are off. If only chunking is off, a chunk is a sequence.

    A data key with at most one frame, while other data keys of the sequence are longer, stays whole and is repeated in each
    chunk.

    Args:
        lengths: by data key, number of frames of every sequence.

    Raises:
        DataError: the data keys of a sequence have different numbers of chunks, or one has too many frames with its context.
    """
    how = parse(keys.chunking)
    context = parse_context(keys.context_window)
    if how is None and context is None:
        return None
    steps: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name in lengths:
        size_and_step = None if how is None else how.size_and_step(name)
        if size_and_step is not None:
            sizes[name], steps[name] = size_and_step
    columns = {name: column.astype(numpy.int64) for name, column in lengths.items()}
    whole = _whole({name: columns[name] for name in sizes})
    counts = _counts(columns, sizes, steps, whole, keys)
    first = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64, copy=False)
    sequences = numpy.repeat(numpy.arange(len(counts)), counts)
    numbers = numpy.arange(first[-1]) - first[sequences]
    chunk_lengths = {}
    for name, column in columns.items():
        here = column[sequences]
        if name in sizes:
            inside = numpy.minimum(sizes[name], here - numbers * steps[name])
            here = numpy.where(whole[name][sequences], here, inside)
        added = 0 if context is None else sum(context.frames(name))
        if added and len(here) and here.max() + added >= FRAMES_END:
            raise DataError(
                f"context_window: expected less than 2**31 frames with those before and after, got {added} of the data key "
                f"{name} with sequences of up to {here.max()}"
            )
        chunk_lengths[name] = (here + added).astype(numpy.int32)
    return Chunks(first, sequences, numbers, chunk_lengths, steps, context)


def _whole(columns: Mapping[str, Array]) -> dict[str, Array]:
    """By data key that is cut, a mask of the sequences whose single frame belongs to the whole sequence."""
    longest = numpy.maximum.reduce(list(columns.values())) if columns else numpy.zeros(0)
    return {name: (column <= 1) & (longest > 1) for name, column in columns.items()}


def _counts(
    columns: Mapping[str, Array], sizes: Mapping[str, int], steps: Mapping[str, int], whole: Mapping[str, Array], keys: ChunkKeys
) -> Array:
    """The number of chunks of every sequence; int64 of shape (num_sequences,). Raises: DataError."""
    size = len(next(iter(columns.values())))
    if not sizes:
        return numpy.ones(size, dtype=numpy.int64)
    counts = numpy.full(size, -1, dtype=numpy.int64)
    first_with: dict[int, str] = {}  # by step, the first data key that has it
    by_key = {}
    for name in sizes:
        here = by_key[name] = _counts_of(columns[name], steps[name], limit_of(keys.min_chunk_size, name), keys.chunking_tail)
        same_step = first_with.setdefault(steps[name], name)
        wrong = ~whole[name] & (counts >= 0) & (counts != here)
        if keys.chunking_tail != "drop_short":
            # Chunks of the same step begin at the same frames, so they should end at the same ones.
            wrong |= ~whole[name] & ~whole[same_step] & (columns[name] != columns[same_step])
        if wrong.any():
            index = int(numpy.flatnonzero(wrong)[0])
            got = " and ".join(f"{by_key[key][index]} of the {columns[key][index]} frames of {key!r}" for key in by_key)
            raise DataError(
                f"chunking: expected data keys that are cut into the same number of chunks (and have the same length if they "
                f"have the same step), got {got} in sequence {index} (give sizes and steps by data key, or even it out "
                "with min_chunk_size)"
            )
        counts = numpy.where(whole[name] | (counts >= 0), counts, here)
    return counts


def _counts_of(column: Array, step: int, least: int, tail: Tail | None) -> Array:
    """The number of chunks of every sequence in one data key."""
    if tail != "drop_short":
        return numpy.where(column > 0, numpy.maximum(1, -(-(column - least) // step)), 0)
    least = max(least, 1)
    return numpy.where(column >= least, (column - least) // step + 1, 0)


def _with_zeros(values: Array, start: int, stop: int) -> Array:
    """The frames of a sequence from `start` up to `stop`, with zeros for those beyond its ends."""
    inside = values[max(start, 0) : stop]
    missing = max(-start, 0), max(stop - len(values), 0)
    return numpy.pad(inside, [missing, *[(0, 0)] * (values.ndim - 1)]) if any(missing) else inside


class ChunkedDataset(PartsOfSequences):
    """The chunks of a dataset's sequences as a dataset; its batches give the indices of the sequences, not of the chunks."""

    def __init__(self, dataset: Dataset, chunks: Chunks) -> None:
        super().__init__(dataset)
        self._chunks = chunks
        self.streams = dataset.streams
        self.lengths = chunks.lengths

    @property
    def num_sequences(self) -> int:
        return len(self._chunks.sequences)

    def sequence(self, index: int) -> dict[str, Array]:
        return self.sequences([index])[0]

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        return list(map(self._part, indices, self.whole(self._chunks.sequences[list(indices)].tolist())))

    def batch(self, indices: Array, packed: Collection[str] = ()) -> Batch:
        data = self.packed(indices, packed) if packed else self.padded(indices)
        return Batch(data, self._chunks.sequences[indices], partial(self.tags, indices.tolist()))

    def _part(self, index: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        number = int(self._chunks.numbers[index])
        chunk = {}
        for name, values in arrays.items():
            before, after = (0, 0) if self._chunks.context is None else self._chunks.context.frames(name)
            length = int(self.lengths[name][index]) - before - after
            start = number * self._chunks.steps.get(name, 0) if length < len(values) else 0
            chunk[name] = _with_zeros(values, start - before, start + length + after)
        return chunk

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(self._chunks.sequences[list(indices)].tolist())
